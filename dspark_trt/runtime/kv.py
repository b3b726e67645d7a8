"""How many positions of each KV row are valid. Both caches, the target's and the drafter's context, are kept so.

Regions of one row:
    [0, committed)                      valid, read by attention
    [committed, committed + reserved)   written by the call in flight; valid only after `commit`
    [committed + reserved, capacity)    free, or left over from rejected drafts: overwritten before it is ever read

Engines never remember lengths: rejecting a draft is committing less than was reserved, nothing is erased.
Source: paper section 3.2 (verification of a prefix).
"""

from __future__ import annotations

import numpy as np

from dspark_trt.errors import CapacityError


class CacheLengths:
    """Committed and reserved lengths of the KV rows of one engine."""

    def __init__(self, *, num_rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.committed = np.zeros(num_rows, dtype=np.int64)
        self._reserved = np.zeros(num_rows, dtype=np.int64)

    def reserve(self, row: int, num_positions: int) -> None:
        """Announce that the next call writes `num_positions` behind the valid ones.

        Raises CapacityError when the row cannot hold them; the row is then unchanged.
        """
        assert num_positions >= 1, "a call writes at least one position"
        assert self._reserved[row] == 0, f"row {row} already has a call in flight"
        last = int(self.committed[row]) + num_positions
        if last > self.capacity:
            raise CapacityError(
                f"KV row {row}: {last} positions are needed, it holds {self.capacity}; "
                "shorten the request, or build the engines with a larger max_seq_len"
            )
        self._reserved[row] = num_positions

    def commit(self, row: int, num_positions: int) -> None:
        """Make the first `num_positions` of the reservation valid and give up the rest; 0: all of it was rejected."""
        assert 0 <= num_positions <= self._reserved[row], f"row {row}: more is committed than was reserved"
        self.committed[row] += num_positions
        self._reserved[row] = 0

    def begin(self, row: int, num_positions: int) -> None:
        """The first positions of an empty row hold K/V already: those of a prefix that was computed before."""
        assert self.committed[row] == 0, f"row {row} has begun"
        assert 0 <= num_positions <= self.capacity, f"row {row}: {num_positions} positions do not fit"
        self.committed[row] = num_positions

    def move(self, source: int, destination: int) -> None:
        """The row's positions were copied: its length follows, the source is empty."""
        assert not self._reserved[[source, destination]].any(), "a row moves only between steps"
        self.committed[destination] = self.committed[source]
        self.clear(source)

    def clear(self, row: int) -> None:
        self.committed[row] = 0
        self._reserved[row] = 0

    def check_integrity(self, num_occupied: int) -> None:
        """Between steps: no call in flight, lengths within capacity, rows without a request are empty."""
        assert not self._reserved.any(), f"rows {np.flatnonzero(self._reserved)} kept a reservation between two steps"
        assert ((self.committed >= 0) & (self.committed <= self.capacity)).all(), "a length is out of range"
        assert not self.committed[num_occupied:].any(), "a row without a request has a length"
