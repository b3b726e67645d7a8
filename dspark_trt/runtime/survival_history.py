"""What the scheduler knows of a request from its past: survivals of blocks that are at least two steps old.

Shape letters: `R` requests, `G` gamma, `L` remembered blocks. Source: paper section 5.2.

A step reads, then hands in its own survivals with `record`; what it reads is two steps old. Rows carry the generation
of their occupant, so that nobody inherits a predecessor's data.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LAG_STEPS = 2
NUM_REMEMBERED = 4  # L: blocks of one request
NUM_POOLED = 64  # blocks of all requests, from which a new request's are guessed


class SurvivalHistory:
    """Survivals per KV row: of the last two steps, waiting, and of the blocks before them, remembered."""

    def __init__(self, *, num_rows: int, gamma: int, prior: Floats) -> None:
        """`prior` [G]: mean survival of slot j before anything is known."""
        self._waiting = np.ones((LAG_STEPS, num_rows, gamma))
        self._waiting_generation = np.full((LAG_STEPS, num_rows), -1, dtype=np.int64)  # -1: nothing was drafted
        self._oldest = 0
        self._remembered = np.zeros((num_rows, NUM_REMEMBERED, gamma))
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)
        self._generation = np.full(num_rows, -1, dtype=np.int64)
        self._pool = np.tile(prior, (NUM_POOLED, 1))
        self._num_pooled = 0
        self._guess = np.tile(prior, (NUM_REMEMBERED, 1))

    def stale(self, rows: Ints, generations: Ints) -> Floats:
        """Survivals of two steps ago; 1 where the occupant had none. [R, G]"""
        is_known = self._waiting_generation[self._oldest, rows] == generations
        return np.where(is_known[:, None], self._waiting[self._oldest, rows], 1.0)

    def remembered(self, rows: Ints, generations: Ints) -> Floats:
        """Survivals of the last L blocks of each request, guessed from all requests' where it had fewer. [R, L, G]"""
        num_blocks = np.where(self._generation[rows] == generations, self._num_blocks[rows], 0)
        is_known = np.arange(NUM_REMEMBERED) < num_blocks[:, None]
        return np.where(is_known[:, :, None], self._remembered[rows], self._guess)

    def record(self, rows: Ints, generations: Ints, fresh: Floats) -> None:
        """Hand in this step's survivals [R, G]; those of two steps ago are remembered from now on."""
        self._remember(self._oldest)
        self._waiting_generation[self._oldest] = -1
        self._waiting_generation[self._oldest, rows] = generations
        self._waiting[self._oldest, rows] = fresh
        self._oldest = (self._oldest + 1) % LAG_STEPS

    def move(self, source: int, destination: int) -> None:
        """An occupant moved to another row."""
        self._waiting[:, destination] = self._waiting[:, source]
        self._waiting_generation[:, destination] = self._waiting_generation[:, source]
        self._remembered[destination] = self._remembered[source]
        self._num_blocks[destination] = self._num_blocks[source]
        self._generation[destination] = self._generation[source]

    def _remember(self, waiting: int) -> None:
        rows = np.flatnonzero(self._waiting_generation[waiting] >= 0)
        if not len(rows):
            return
        generations, survivals = self._waiting_generation[waiting, rows], self._waiting[waiting, rows]
        is_new = self._generation[rows] != generations
        self._num_blocks[rows[is_new]] = 0
        self._generation[rows] = generations
        self._remembered[rows, self._num_blocks[rows] % NUM_REMEMBERED] = survivals
        self._num_blocks[rows] += 1
        at = (self._num_pooled + np.arange(len(rows))) % NUM_POOLED
        self._pool[at[-NUM_POOLED:]] = survivals[-NUM_POOLED:]
        self._num_pooled += len(rows)
        order = np.argsort(self._pool.sum(axis=1))
        quantiles = (np.arange(NUM_REMEMBERED) * 2 + 1) * NUM_POOLED // (2 * NUM_REMEMBERED)
        self._guess = self._pool[order[quantiles]]
