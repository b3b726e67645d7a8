"""Which pages of the KV pool belong to which row.

A row's positions stand in the pages of its block table, one behind the other. A page belongs to nobody, to one row, or,
where rows begin with the same tokens, to several, which then only read it: a full page is never written again. What a
row gives back is free at once; a page whose content has a key (`prefix_pages.py`) keeps it while it is free, and such
pages are taken last, the least recently used first. Page 0 is nobody's: padding is written there.

The target and the drafter share one numbering: page p of both holds the same positions.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.protocol import PageLimits
from dspark_trt.errors import CapacityError

Int64 = NDArray[np.int64]
Key = Hashable  # of what a full page holds: its tokens and all before them
NO_PAGE = 0


class PagePool:
    """Who holds which page."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._holders = np.zeros(num_pages, np.int64)  # rows that have the page
        self._unused = deque(range(1, num_pages))
        self._kept: OrderedDict[int, Key] = OrderedDict()  # free, with a key; the least recently used first
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    @property
    def num_free(self) -> int:
        return len(self._unused) + len(self._kept)

    def is_free(self, page: int) -> bool:
        return not self._holders[page]

    def take(self) -> int:
        """A page that nobody has, as the only holder."""
        assert self.num_free, "no free page: ask num_free first"
        if self._unused:
            page = self._unused.popleft()
        else:
            page, key = self._kept.popitem(last=False)
            del self._page_of[key], self._key_of[page]
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that has a key."""
        assert page in self._key_of, f"page {page} may still be written"
        if not self._holders[page]:
            del self._kept[page]
        self._holders[page] += 1

    def give_back(self, page: int) -> None:
        """One holder less."""
        assert self._holders[page] > 0, f"page {page} is given back twice"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._key_of:
            self._kept[page] = self._key_of[page]
        else:
            self._unused.append(page)

    def find(self, key: Key) -> int:
        """The page that holds what `key` says; NO_PAGE: none does."""
        return self._page_of.get(key, NO_PAGE)

    def name(self, page: int, key: Key) -> None:
        """A full page of a row holds what `key` says. The first page of a key is found, others are as they were."""
        assert self._holders[page] > 0, f"page {page} is nobody's"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def forget(self) -> None:
        """What pages hold is not trusted any more: no key is found from now on."""
        self._unused.extend(self._kept)
        self._kept.clear()
        self._page_of.clear()
        self._key_of.clear()

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """`tables`: the pages of every row. No page twice in a row, none lost, none of nobody's."""
        holders = np.zeros(self.num_pages, np.int64)
        for pages in tables:
            assert len(set(pages)) == len(pages), "a page stands twice in one row"
            holders[list(pages)] += 1
        assert (holders == self._holders).all(), "pages have other holders than rows say"
        free = [*self._unused, *self._kept]
        assert len(set(free)) == len(free), "a page is free twice"
        assert sorted(free) == (1 + np.flatnonzero(holders[1:] == 0)).tolist(), "a page was lost"
        assert not holders[NO_PAGE], "page 0 belongs to a row"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages disagree"


class BlockTables:
    """The pages of every row."""

    def __init__(self, limits: PageLimits, *, num_rows: int) -> None:
        """Raises CapacityError where a single row could not be full."""
        if limits.num_pages <= limits.table_width:
            raise CapacityError(
                f"KV memory: {limits.num_pages} pages do not hold one request of full length, which takes "
                f"{limits.table_width} and the page that is nobody's; raise --gpu-memory-utilization, or build with a "
                "smaller --max-seq-len"
            )
        self.limits = limits
        self.pool = PagePool(limits.num_pages)
        self._tables = np.zeros((num_rows, limits.table_width), np.int64)
        self._counts = np.zeros(num_rows, np.int64)  # pages of each row

    def tables(self, rows: Int64) -> Int64:
        """[R, W], page 0 behind the pages of a row."""
        return self._tables[rows]

    def pages_of(self, row: int) -> list[int]:
        pages: list[int] = self._tables[row, : self._counts[row]].tolist()
        return pages

    def num_missing(self, row: int, num_positions: int) -> int:
        """Pages that a row lacks to hold so many positions."""
        return max(self.limits.pages_for(num_positions) - int(self._counts[row]), 0)

    def grow(self, row: int, num_positions: int) -> bool:
        """Give a row what it lacks to hold so many positions, all of it or nothing. False: too few pages are free."""
        num_missing = self.num_missing(row, num_positions)
        if num_missing > self.pool.num_free:
            return False
        for _ in range(num_missing):
            self._append(row, self.pool.take())
        return True

    def begin(self, row: int, shared: Sequence[int]) -> None:
        """The first pages of a row are those of other rows, or free ones that are still known; its own are free."""
        for page in shared:
            self.pool.share(page)
        rest = self.pages_of(row)[len(shared) :]
        for page in self.pages_of(row)[: len(shared)]:
            self.pool.give_back(page)
        self._counts[row] = 0
        for page in (*shared, *rest):
            self._append(row, page)

    def release(self, row: int) -> None:
        """A row has no pages any more. The last ones are given back first: beginnings are of use to others longest."""
        for page in reversed(self.pages_of(row)):
            self.pool.give_back(page)
        self._tables[row] = NO_PAGE
        self._counts[row] = 0

    def move(self, source: int, destination: int) -> None:
        """Another row has the pages of `source` now; `destination` had none."""
        assert not self._counts[destination], f"row {destination} has pages"
        self._tables[destination], self._counts[destination] = self._tables[source], self._counts[source]
        self._tables[source] = NO_PAGE
        self._counts[source] = 0

    def check_integrity(self, num_occupied: int) -> None:
        """Between two steps; rows from `num_occupied` on have none."""
        self.pool.check_integrity([self.pages_of(row) for row in range(len(self._tables))])
        assert not self._counts[num_occupied:].any(), "a row without a request has pages"
        assert all((self._tables[row, count:] == NO_PAGE).all() for row, count in enumerate(self._counts)), (
            "stale pages"
        )

    def _append(self, row: int, page: int) -> None:
        self._tables[row, self._counts[row]] = page
        self._counts[row] += 1
