"""How raw confidence logits become probabilities:
one straight line per slot and sampling regime, which keeps their order.

Source: paper section 3.2.1 (Sequential Temperature Scaling: slope 1 / T_j, offset 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import RecipeError

Floats = NDArray[np.float64]

UNKNOWN_CONFIDENCE = 0.7  # of a drafter that nothing has been measured of
NUM_TYPICAL_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class SlotCalibration:
    """confidence of slot j = sigmoid(slopes[j] * logit + offsets[j])."""

    slopes: tuple[float, ...]  # [G], > 0
    offsets: tuple[float, ...]  # [G]

    def __post_init__(self) -> None:
        """Raises RecipeError when a number is not usable."""
        slopes, offsets = np.asarray(self.slopes), np.asarray(self.offsets)
        if slopes.shape != offsets.shape or not (np.isfinite(slopes) & np.isfinite(offsets) & (slopes > 0)).all():
            raise RecipeError(
                "calibration: expected one finite slope > 0 and one finite offset a slot, found slopes "
                f"{list(self.slopes)}, offsets {list(self.offsets)}; run `dspark-trt calibrate` again"
            )


@dataclass(frozen=True)
class Calibration:
    """The lines of greedy requests and of those that sample: their confidences mean different acceptance."""

    greedy: SlotCalibration
    sampled: SlotCalibration
    survival: tuple[float, ...] = ()  # [G] mean survival of slot j where it was measured; (): not measured
    blocks: tuple[tuple[float, ...], ...] = ()  # `typical_blocks` where they were measured; (): not measured

    @cached_property
    def _lines(self) -> Floats:
        """Slope and offset of each slot, for greedy requests and those that sample. [2, 2, G]"""
        return np.array([[each.slopes, each.offsets] for each in (self.greedy, self.sampled)], dtype=np.float64)

    @property
    def expected_survival(self) -> Floats:
        """Mean survival of each slot before anything of a request is known, [G]."""
        guess = tuple(UNKNOWN_CONFIDENCE**slot for slot in range(1, self.gamma + 1))
        return np.array(self.survival or guess, dtype=np.float64)

    @property
    def expected_blocks(self) -> Floats:
        """Survivals of equally likely blocks before anything is known, [N, G]."""
        return np.array(self.blocks, dtype=np.float64) if self.blocks else blocks_around(self.expected_survival)

    @classmethod
    def from_temperatures(cls, temperatures: Sequence[float]) -> Calibration:
        """Plain STS: T_j of each slot, for every regime; all 1 is neutral. Raises RecipeError."""
        if not all(np.isfinite(temperatures)) or min(temperatures, default=1.0) <= 0:
            raise RecipeError(f"confidence temperatures: expected finite numbers > 0, found {list(temperatures)}")
        line = SlotCalibration(tuple(1.0 / each for each in temperatures), (0.0,) * len(temperatures))
        return cls(greedy=line, sampled=line)

    @property
    def gamma(self) -> int:
        return len(self.greedy.slopes)

    def confidence(
        self, confidence_logits: NDArray[np.float32], is_greedy: NDArray[np.bool_], shifts: Floats | None = None
    ) -> Floats:
        """Calibrated confidences [R, n] of the first n slots; 0 where a logit is not finite. is_greedy [R].

        shifts [2, G]: added to the offsets of greedy and of sampling requests, learned while serving.
        """
        num_slots = confidence_logits.shape[1]
        logits = confidence_logits.astype(np.float64)
        is_finite = np.isfinite(logits)
        regimes = np.where(is_greedy, 0, 1)
        lines = self._lines[regimes, :, :num_slots]  # [R, 2, n]
        scaled = lines[:, 0] * np.where(is_finite, logits, 0.0) + lines[:, 1]
        if shifts is not None:
            scaled += shifts[regimes, :num_slots]
        confidence: Floats = np.where(is_finite, np.tanh(0.5 * scaled) * 0.5 + 0.5, 0.0)
        return confidence


def typical_blocks(survival: Floats) -> Floats:
    """Means of NUM_TYPICAL_BLOCKS equal parts of blocks [N, G], ordered by how many of their drafts survive."""
    ordered = survival[np.argsort(survival.sum(axis=1))]
    if len(ordered) < NUM_TYPICAL_BLOCKS:
        ordered = np.repeat(ordered, -(-NUM_TYPICAL_BLOCKS // len(ordered)), axis=0)
    ends = np.linspace(0, len(ordered), NUM_TYPICAL_BLOCKS + 1).astype(np.int64)
    means: Floats = np.add.reduceat(ordered, ends[:-1], axis=0) / np.diff(ends)[:, None]
    return means


def blocks_around(survival: Floats) -> Floats:
    """A guess, where only mean survivals [G] are known: odds spread evenly between 0 and twice the mean. [N, G]"""
    shares = np.linspace(0.0, 2.0, NUM_TYPICAL_BLOCKS, endpoint=False) + 1.0 / NUM_TYPICAL_BLOCKS
    blocks: Floats = np.minimum(survival[None, :] * shares[:, None], 1.0)
    return blocks
