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

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LAG_STEPS = 2
NUM_QUANTILES = 8  # Q
NUM_POOLED = 32  # blocks of all requests
MEMORY_DECAY = 0.95  # of a request's own blocks, a block
POOL_WEIGHT = 4.0  # blocks that the mean of all requests counts for
_TINY = 1e-6


class SurvivalHistory:
    """Survivals per KV row: of the last two steps, waiting, and of all blocks before them, summed up."""

    def __init__(self, *, num_rows: int, gamma: int, prior: Floats) -> None:
        """`prior` [G]: mean survival of slot j before anything is known."""
        self._waiting = np.ones((LAG_STEPS, num_rows, gamma))
        self._waiting_generation = np.full((LAG_STEPS, num_rows), -1, dtype=np.int64)  # -1: nothing was drafted
        self._has_waiting = [False] * LAG_STEPS
        self._oldest = 0
        self._sums = np.zeros((num_rows, gamma))
        self._weights = np.zeros(num_rows)
        self._generation = np.full(num_rows, -1, dtype=np.int64)
        self._pool = _spread(prior, NUM_POOLED)
        self._num_pooled = 0
        self._typical: Floats | None = None  # [Q, G] of the pool, computed when it is asked for

    def stale(self, rows: Ints, generations: Ints) -> Floats:
        """Survivals of two steps ago; 1 where the occupant had none. [R, G]"""
        is_known = self._waiting_generation[self._oldest, rows] == generations
        return np.where(is_known[:, None], self._waiting[self._oldest, rows], 1.0)

    def expected(self, rows: Ints, generations: Ints) -> Floats:
        """Q equally likely blocks of each request. [R, Q, G]"""
        if self._typical is None:
            self._typical = _quantiles(self._pool)
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
        generations, survivals = self._waiting_generation[waiting, rows], self._waiting[waiting, rows]
        kept = np.where(self._generation[rows] == generations, MEMORY_DECAY, 0.0)
        self._generation[rows] = generations
        self._sums[rows] = kept[:, None] * self._sums[rows] + survivals
        self._weights[rows] = kept * self._weights[rows] + 1.0
        at = (self._num_pooled + np.arange(len(rows))) % NUM_POOLED
        self._pool[at[-NUM_POOLED:]] = survivals[-NUM_POOLED:]
        self._num_pooled += len(rows)
        self._typical = None
        self._waiting_generation[waiting] = -1


def _spread(prior: Floats, count: int) -> Floats:
    """Blocks of unlike promise whose mean is `prior`: odds spread evenly between 0 and twice its own."""
    shares = np.linspace(0.0, 2.0, count, endpoint=False) + 1.0 / count
    blocks: Floats = np.minimum(prior[None, :] * shares[:, None], 1.0)
    return blocks


def _quantiles(pool: Floats) -> Floats:
    """Means of Q equal parts of the pool, ordered by promise. [Q, G]"""
    ordered = pool[np.argsort(pool.sum(axis=1))]
    means: Floats = ordered.reshape(NUM_QUANTILES, -1, pool.shape[1]).mean(axis=1)
    return means
