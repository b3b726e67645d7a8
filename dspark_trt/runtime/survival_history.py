"""What the scheduler knows of a request from its past: survivals of blocks that are at least two steps old.

Shape letters: `R` requests, `G` gamma, `Q` quantiles. Source: paper section 5.2.

A step reads, then hands in its own survivals with `record`; what it reads is two steps old. Rows carry the generation
of their occupant, so that nobody inherits a predecessor's data.

What is expected of a request is its own mean, pulled towards that of all requests while it is known little: a request
that looks good after a few blocks is less good than it looks. How blocks spread around a mean is taken from all
requests' blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.calibration import NUM_TYPICAL_BLOCKS, typical_blocks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LAG_STEPS = 2
NUM_QUANTILES = NUM_TYPICAL_BLOCKS  # Q
NUM_POOLED = 128  # blocks of all requests
MIN_POOLED_BY_STEP = 4  # a step of few requests counts for so many: what was long ago is forgotten
MEMORY_DECAY = 0.95  # of a request's own blocks, a block
POOL_WEIGHT = 4.0  # blocks that the mean of all requests counts for
_TINY = 1e-6


class SurvivalHistory:
    """Survivals per KV row: of the last two steps, waiting, and of all blocks before them, summed up."""

    def __init__(self, *, num_rows: int, gamma: int, prior: Floats) -> None:
        """`prior` [N, G]: equally likely blocks before anything is known."""
        self._waiting = np.ones((LAG_STEPS, num_rows, gamma))
        self._waiting_generation = np.full((LAG_STEPS, num_rows), -1, dtype=np.int64)  # -1: nothing was drafted
        self._has_waiting = [False] * LAG_STEPS
        self._oldest = 0
        self._sums = np.zeros((num_rows, gamma))
        self._weights = np.zeros(num_rows)
        self._generation = np.full(num_rows, -1, dtype=np.int64)
        self._pool = np.resize(typical_blocks(prior), (NUM_POOLED, gamma))
        self._num_pooled = 0
        self._typical: Floats | None = None  # [Q, G] of the pool, computed when it is asked for

    def stale(self, rows: Ints, generations: Ints) -> Floats:
        """Survivals of two steps ago; 1 where the occupant had none. [R, G]"""
        is_known = self._waiting_generation[self._oldest, rows] == generations
        return np.where(is_known[:, None], self._waiting[self._oldest, rows], 1.0)

    def expected(self, rows: Ints, generations: Ints) -> Floats:
        """Q equally likely blocks of each request. [R, Q, G]"""
        if self._typical is None:
            self._typical = typical_blocks(self._pool)
        typical = self._typical.mean(axis=0)
        is_known = (self._generation[rows] == generations)[:, None]
        sums = np.where(is_known, self._sums[rows], 0.0)
        weights = np.where(is_known, self._weights[rows, None], 0.0)
        means = (sums + POOL_WEIGHT * typical) / (weights + POOL_WEIGHT)  # [R, G]
        scaled: Floats = self._typical * (means / np.maximum(typical, _TINY))[:, None, :]
        return np.minimum(scaled, 1.0)

    def record(self, rows: Ints, generations: Ints, fresh: Floats) -> None:
        """Hand in this step's survivals [R, G]; those of two steps ago are remembered from now on."""
        self._remember_oldest()
        self._waiting_generation[self._oldest, rows] = generations
        self._waiting[self._oldest, rows] = fresh
        self._has_waiting[self._oldest] = len(rows) > 0
        self._oldest = (self._oldest + 1) % LAG_STEPS

    def record_nothing(self) -> None:
        """This step drafted nothing; those before it are a step older all the same."""
        self._remember_oldest()
        self._oldest = (self._oldest + 1) % LAG_STEPS

    def move(self, source: int, destination: int) -> None:
        """An occupant moved to another row."""
        self._waiting[:, destination] = self._waiting[:, source]
        self._waiting_generation[:, destination] = self._waiting_generation[:, source]
        self._sums[destination] = self._sums[source]
        self._weights[destination] = self._weights[source]
        self._generation[destination] = self._generation[source]

    def _remember_oldest(self) -> None:
        if not self._has_waiting[self._oldest]:
            return
        waiting, self._has_waiting[self._oldest] = self._oldest, False
        rows = np.flatnonzero(self._waiting_generation[waiting] >= 0)
        if not len(rows):  # who drafted has left
            return
        generations, survivals = self._waiting_generation[waiting, rows], self._waiting[waiting, rows]
        kept = np.where(self._generation[rows] == generations, MEMORY_DECAY, 0.0)
        self._generation[rows] = generations
        self._sums[rows] = kept[:, None] * self._sums[rows] + survivals
        self._weights[rows] = kept * self._weights[rows] + 1.0
        # none where others have moved into all of that step's rows
        pooled = np.repeat(survivals, max(MIN_POOLED_BY_STEP // max(len(rows), 1), 1), axis=0)[-NUM_POOLED:]
        self._pool[(self._num_pooled + np.arange(len(pooled))) % NUM_POOLED] = pooled
        self._num_pooled += len(pooled)
        self._typical = None
        self._waiting_generation[waiting] = -1
