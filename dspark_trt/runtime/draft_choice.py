"""What the policy that decides about drafting is told of a step, and what it answers.

Shape letters: `R` requests that decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.survival_history import Ints


@dataclass(frozen=True, slots=True)
class Decoding:
    """What the policy knows of a step: fixed before anything is drafted."""

    rows: Ints  # [R] KV rows of the requests that decode
    generations: Ints  # [R] of their occupants
    caps: Ints  # [R] drafts that may be verified at most
    num_pending: Ints  # [R] positions that the drafter's context lacks
    context_tokens: float  # mean positions that a request holds


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """Who drafts, and how much."""

    num_slots: int  # n; 0: nobody drafts
    is_drafting: NDArray[np.bool_]  # [R]
    is_explored: NDArray[np.bool_]  # [R] drafts in order to learn: verified at its cap
    is_looking_up: NDArray[np.bool_]  # [R] its drafts are those of its lookup; the drafter makes none for it
    tokens_per_ms: float = 0.0  # expected of the step; 0: nobody drafts
    num_planned: int = 0  # drafts that are admitted whatever is seen of them; 0: admission stops early

    @classmethod
    def nobody(cls, num_requests: int) -> DraftChoice:
        none = np.zeros(num_requests, dtype=np.bool_)
        return cls(0, none, none, none)

    def without(self, is_excluded: NDArray[np.bool_]) -> DraftChoice:
        """The same, but the drafter drafts for none of these. is_excluded [R]."""
        is_drafting = self.is_drafting & ~is_excluded
        if not is_drafting.any():
            return DraftChoice.nobody(len(is_drafting))
        return replace(self, is_drafting=is_drafting)
