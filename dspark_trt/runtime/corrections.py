"""What serving teaches about prices and acceptance: slow, bounded, and from steps at least two steps old.

Shape letters: `R` requests, `n` slots drafted. Source: paper section 5.2 (two-step rule), DESIGN section 7.

A correction moves by a small step towards what was seen, however far off that was: a burst of noise cannot take it
along.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Part = Literal["verify", "verify_drafts", "draft", "host", "drafting_host", "lookup_host"]

LAG_STEPS = 2
TIME_RATE = 0.05  # of the distance in log time, a step
MAX_TIME_STEP = 0.01  # one observation moves a price by at most so much, in log time
MAX_TIME_FACTOR = 2.0
RETURN_RATE = 0.002  # of what steps with drafts are dearer by than others, forgotten each step
ACCEPTANCE_RATE = 0.03  # of the difference between seen and expected acceptance, in logits
MAX_ACCEPTANCE_SHIFT = 1.5  # logits
REALISED_DECAY = 0.99  # of what drafting steps have brought, a step
REALISED_PRIOR_STEPS = 30.0  # steps that went as expected, before any is seen
REALISED_BOUNDS = (0.8, 1.05)

Seen = TypeVar("Seen")


class Lagged(Generic[Seen]):
    """Hands observations on when they are two steps old."""

    def __init__(self, apply: Callable[[Seen], None]) -> None:
        self._apply = apply
        self._waiting: deque[list[Seen]] = deque([[] for _ in range(LAG_STEPS)])

    def add(self, seen: Seen) -> None:
        self._waiting[-1].append(seen)

    def advance(self) -> None:
        """A step begins."""
        for seen in self._waiting.popleft():
            self._apply(seen)
        self._waiting.append([])


class TimeCorrection:
    """Factors on the prices of the table, for request counts between two powers of two."""

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._log_factors: dict[tuple[Part, int], float] = {}
        self._lagged: Lagged[tuple[tuple[Part, int], float]] = Lagged(self._move)

    def factor(self, part: Part, num_requests: int) -> float:
        """What the table's price of a part is multiplied by."""
        bucket = num_requests.bit_length()
        parts: tuple[Part, ...] = ("verify", "verify_drafts") if part == "verify_drafts" else (part,)
        return math.exp(sum(self._log_factors.get((each, bucket), 0.0) for each in parts))

    def observe(self, part: Part, num_requests: int, *, expected_ms: float, seen_ms: float) -> None:
        """`expected_ms` is the corrected price."""
        if self._is_on and expected_ms > 0 and seen_ms > 0:
            self._lagged.add(((part, num_requests.bit_length()), math.log(seen_ms / expected_ms)))

    def advance(self) -> None:
        self._lagged.advance()

    def _move(self, seen: tuple[tuple[Part, int], float]) -> None:
        key, distance = seen
        step = min(max(TIME_RATE * distance, -MAX_TIME_STEP), MAX_TIME_STEP)
        limit = math.log(MAX_TIME_FACTOR)
        part, bucket = key
        moves = {key: step}
        if part == "verify_drafts":  # the whole host may have become slower, or drafts be dearer than measured
            moves = {("verify", bucket): step / 2, ("verify_drafts", bucket): step / 2}
        for moved, by in moves.items():
            self._log_factors[moved] = min(max(self._log_factors.get(moved, 0.0) + by, -limit), limit)
        if part in ("verify", "verify_drafts"):  # what is not tried again must not stay dear for ever
            self._log_factors["verify_drafts", bucket] = (1 - RETURN_RATE) * self._log_factors.get(
                ("verify_drafts", bucket), 0.0
            )


class AcceptanceCorrection:
    """A shift of each slot's calibrated confidence, in logits, for greedy and for sampling requests."""

    def __init__(self, gamma: int, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self.shifts = np.zeros((2, gamma))  # [greedy, sampled] x slot
        self._lagged: Lagged[tuple[Floats, Ints, Ints, NDArray[np.bool_]]] = Lagged(self._move)

    def observe(self, confidence: Floats, verify_lens: Ints, num_accepted: Ints, is_greedy: NDArray[np.bool_]) -> None:
        """What became of the drafts that were verified. confidence [R, n], the others [R].

        Only slots behind accepted drafts tell anything: slot j of a request counts where its first j - 1 drafts were
        accepted and draft j was verified.
        """
        if self._is_on and verify_lens.any():
            self._lagged.add((confidence, verify_lens, num_accepted, is_greedy))

    def advance(self) -> None:
        self._lagged.advance()

    def _move(self, seen: tuple[Floats, Ints, Ints, NDArray[np.bool_]]) -> None:
        confidence, verify_lens, num_accepted, is_greedy = seen
        num_slots = confidence.shape[1]
        slots = np.arange(num_slots)
        is_seen = (slots < verify_lens[:, None]) & (slots <= num_accepted[:, None])
        surprise = np.where(is_seen, (slots < num_accepted[:, None]) - confidence, 0.0)
        for regime, of_regime in enumerate((is_greedy, ~is_greedy)):
            self.shifts[regime, :num_slots] += ACCEPTANCE_RATE * surprise[of_regime].sum(axis=0)
        np.clip(self.shifts, -MAX_ACCEPTANCE_SHIFT, MAX_ACCEPTANCE_SHIFT, out=self.shifts)


class RealisedGain:
    """Tokens that drafting steps brought, over those expected of them, for request counts between two powers of two.

    Choosing the most promising of many choices overestimates it; this takes back what the choice does not keep.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}  # tokens seen, tokens expected
        self._lagged: Lagged[tuple[int, float, float]] = Lagged(self._move)

    def factor(self, num_requests: int) -> float:
        """What an expectation is worth."""
        seen, expected = self._sums.get(num_requests.bit_length(), (0.0, 0.0))
        prior = REALISED_PRIOR_STEPS * num_requests
        low, high = REALISED_BOUNDS
        return min(max((seen + prior) / (expected + prior), low), high)

    def observe(self, num_requests: int, *, seen: float, expected: float) -> None:
        """Tokens of a step that drafted."""
        self._lagged.add((num_requests.bit_length(), seen, expected))

    def advance(self) -> None:
        self._lagged.advance()

    def _move(self, observed: tuple[int, float, float]) -> None:
        key, seen, expected = observed
        old_seen, old_expected = self._sums.get(key, (0.0, 0.0))
        self._sums[key] = (REALISED_DECAY * old_seen + seen, REALISED_DECAY * old_expected + expected)
