"""What `lagged_budget` knows of a request: its survivals of the last two steps (paper section 5.2).

Shape letters: `R` requests, `G` gamma.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class SurvivalHistory:
    """Survivals of the last two steps per KV row, each under the generation of the row's occupant.

    A step reads `stale` before it hands in its own with `record`: what it reads is two steps old.
    """

    LAG_STEPS = 2

    def __init__(self, *, num_rows: int, gamma: int) -> None:
        self._survival = np.ones((self.LAG_STEPS, num_rows, gamma))
        self._generation = np.full((self.LAG_STEPS, num_rows), -1, dtype=np.int64)  # -1: nothing was drafted
        self._oldest = 0

    def stale(self, rows: Ints, generations: Ints) -> Floats:
        """Survivals of two steps ago; 1 where the occupant had none. [R, G]"""
        is_known = self._generation[self._oldest, rows] == generations
        return np.where(is_known[:, None], self._survival[self._oldest, rows], 1.0)

    def record(self, rows: Ints, generations: Ints, fresh: Floats) -> None:
        """Hand in this step's survivals [R, G], in place of the oldest ones."""
        self._generation[self._oldest] = -1
        self._generation[self._oldest, rows] = generations
        self._survival[self._oldest, rows] = fresh
        self._oldest = (self._oldest + 1) % self.LAG_STEPS

    def move(self, source: int, destination: int) -> None:
        self._survival[:, destination] = self._survival[:, source]
        self._generation[:, destination] = self._generation[:, source]
