"""How often a draft is accepted that was copied from the request's own text, by the length of the match before it.

When a draft is accepted, the match before the next one is a token longer: one curve serves every slot. Source: prompt
lookup decoding (n-gram drafts).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import RecipeError

MAX_MATCH = 16  # longer matches count as this long


@dataclass(frozen=True, slots=True)
class LookupAcceptance:
    """P(the next draft is accepted) behind a match of 1, 2, ... MAX_MATCH tokens."""

    greedy: tuple[float, ...]  # [MAX_MATCH]
    sampled: tuple[float, ...]  # [MAX_MATCH]

    def __post_init__(self) -> None:
        """Raises RecipeError when a number is not usable."""
        for curve in (self.greedy, self.sampled):
            if len(curve) != MAX_MATCH or not all(0.0 < each < 1.0 for each in curve):
                raise RecipeError(
                    f"lookup acceptance: expected {MAX_MATCH} numbers between 0 and 1, found {list(curve)}; run "
                    "`dspark-trt calibrate` again"
                )

    @property
    def curves(self) -> NDArray[np.float64]:
        """[greedy, sampled] x [MAX_MATCH]"""
        return np.array([self.greedy, self.sampled])


# Before anything is measured: what an instruction-tuned model of 135 M parameters does, rounded down.
_GUESS = (0.15, 0.35, 0.45, 0.55, 0.6, 0.65, 0.7, 0.75, 0.78, 0.8, 0.82, 0.84, 0.86, 0.87, 0.88, 0.89)
UNMEASURED_LOOKUP = LookupAcceptance(greedy=_GUESS, sampled=_GUESS)
