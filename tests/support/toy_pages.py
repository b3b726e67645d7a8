"""The toy engines over pages: their store is a pool, and a call's block tables say where a row's positions are.

They refuse what pages must not do: a position that is read was written for this row, and a page that is written belongs
to one row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_trt.contract.protocol import (
    DraftBatch,
    DraftOutput,
    EngineLimits,
    IngestBatch,
    PageLimits,
    TargetBatch,
    TargetOutput,
)
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.loop import DecodingLoop
from tests.support.toy_engines import EMPTY, ToyDrafter, ToyLanguage, ToyTarget, make_loop

PAGE_POSITIONS = 4


def page_limits(limits: EngineLimits, num_pages: int, gamma: int, *, holds_context: bool = True) -> PageLimits:
    width = -(-(limits.max_seq_len + gamma + 1) // PAGE_POSITIONS)
    return PageLimits(num_pages, PAGE_POSITIONS, width, gamma + 1, holds_context)


class PagedArray:
    """Numbers by row and position, as the toy engines index them, in pages."""

    def __init__(self, num_pages: int) -> None:
        self.pages = np.full((num_pages, PAGE_POSITIONS), EMPTY, dtype=np.int64)
        self.tables: dict[int, list[int]] = {}

    def use(self, rows: np.ndarray, block_tables: np.ndarray | None) -> None:
        """The tables of a call; other rows have none in it."""
        assert block_tables is not None, "engines with pages are told which"
        self.tables = {
            int(row): [page for page in table.tolist() if page] for row, table in zip(rows, block_tables, strict=True)
        }

    def places(self, row: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(begin, end)
        table = np.array(self.tables[row])
        assert end <= len(table) * PAGE_POSITIONS, f"row {row}: no page for position {end - 1}"
        return table[positions // PAGE_POSITIONS], positions % PAGE_POSITIONS

    def __getitem__(self, at: tuple[int, int]) -> int:
        row, position = at
        return int(self.pages[self.places(row, position, position + 1)][0])

    def __setitem__(self, at: tuple[int, slice], values: Any) -> None:
        row, part = at
        self.pages[self.places(row, part.start, part.stop)] = values


class PagedStore(PagedArray):
    """`_Store` of the toy engines."""

    def write(self, row: int, past: int, tokens: Sequence[int]) -> None:
        assert EMPTY not in self.read(row, past), f"row {row}: the past of {past} positions has holes"
        behind = self.tables[row][past // PAGE_POSITIONS :]
        assert sum(page in behind for table in self.tables.values() for page in table) == len(behind), (
            "another row of the call has a page that is written"
        )
        self.pages[self.places(row, past, len(self.tables[row]) * PAGE_POSITIONS)] = EMPTY
        self[row, slice(past, past + len(tokens))] = tokens

    def read(self, row: int, length: int) -> list[int]:
        context: list[int] = self.pages[self.places(row, 0, length)].tolist()
        assert EMPTY not in context, f"row {row}: position {context.index(EMPTY)} was never written, or was rolled back"
        return context

    def move(self, source: int, destination: int, num_positions: int) -> None:
        """Pages follow their tables."""


class PagedTarget(ToyTarget):
    def __init__(self, language: ToyLanguage, limits: EngineLimits, num_pages: int) -> None:
        super().__init__(language, limits)
        self.store: Any = PagedStore(num_pages)

    def forward(self, batch: TargetBatch) -> TargetOutput:
        self.store.use(batch.rows, batch.block_tables)
        return super().forward(batch)


class PagedDrafter(ToyDrafter):
    def __init__(self, language: ToyLanguage, limits: EngineLimits, num_pages: int, **options: Any) -> None:
        super().__init__(language, limits, **options)
        self.store: Any = PagedStore(num_pages)
        self._next_ids: Any = PagedArray(num_pages)

    def ingest(self, batch: IngestBatch) -> None:
        for part in (self.store, self._next_ids):
            part.use(batch.rows, batch.block_tables)
        super().ingest(batch)

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        if ingest is not None:
            self.ingest(ingest)
        for part in (self.store, self._next_ids):
            part.use(batch.rows, batch.block_tables)
        return super().draft(batch)

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._called("move_row")


def paged_loop(
    language: ToyLanguage,
    limits: EngineLimits,
    scheduler: SchedulerConfig,
    *,
    num_pages: int,
    prefix_cache: bool = False,
    has_drafter: bool = True,
    holds_context: bool = True,
    **options: Any,
) -> DecodingLoop:
    """`holds_context`: of the pages; otherwise the drafter keeps its context in rows of its own."""
    target = PagedTarget(language, limits, num_pages)
    drafter: ToyDrafter | None = None
    if has_drafter:
        drafter = (
            PagedDrafter(language, limits, num_pages, **options)
            if holds_context
            else ToyDrafter(language, limits, **options)
        )
    pages = page_limits(limits, num_pages, drafter.gamma if drafter else 0, holds_context=holds_context)
    return make_loop(target, drafter, scheduler, prefix_cache=prefix_cache, pages=pages)
