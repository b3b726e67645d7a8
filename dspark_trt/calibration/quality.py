"""How well survivals were predicted: calibration error and its uncertainty, AUC, bins of a reliability diagram.

Shape letters: `N` blocks, `G` gamma, `P` prompts, `B` bins, `S` resamples. Source: paper section 3.2.1.

ECE counts chance as error: a perfect prediction of 4,000 blocks shows 2 %. So the share of chance stands beside it, and
the interval is that of the error behind it (basic bootstrap, which takes off what resampling adds). Blocks of one
prompt resemble each other, so the prompts are what is resampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.calibration.record import Recording
from dspark_trt.contract.calibration import Calibration

Floats = NDArray[np.float64]

NUM_BINS = 20
NUM_RESAMPLES = 2000
COVERAGE = 0.95  # of the bootstrap intervals


@dataclass(frozen=True, slots=True)
class Bin:
    """One point of a reliability diagram: means over the blocks whose prediction falls into it."""

    num_blocks: int
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True)
class Quality:
    """How well survivals of one position were predicted."""

    num_blocks: int
    mean_predicted: float
    mean_observed: float
    ece: float  # cumulative: of the product up to this position
    ece_low: float | None  # 95 % bootstrap interval of the error without chance; None: a single prompt
    ece_high: float | None
    ece_noise: float | None  # mean ECE of predictions without any error, on so many prompts
    auc: float
    bins: tuple[Bin, ...]  # those that are not empty


def qualities(recording: Recording, calibration: Calibration) -> list[Quality]:
    """One entry for each position: survivals as predicted by `calibration` against observed prefix acceptance."""
    confidence = calibration.confidence(recording.confidence_logits, recording.is_greedy)
    predicted: Floats = np.cumprod(confidence, axis=1, dtype=np.float64)
    observed: Floats = np.cumprod(recording.acceptance, axis=1, dtype=np.float64)
    prompts, prompt_of = np.unique(recording.groups, return_inverse=True)
    num_prompts = len(prompts)
    draws = np.ones((0, num_prompts))
    if num_prompts > 1:
        random = np.random.default_rng(0)
        draws = random.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), NUM_RESAMPLES).astype(np.float64)
    found = []
    for slot in range(predicted.shape[1]):
        p, o = predicted[:, slot], observed[:, slot]
        gaps = _gaps(p, o, prompt_of, num_prompts)
        ece = expected_calibration_error(p, o)
        low, high, noise = _uncertainty(ece, draws, gaps, np.bincount(prompt_of, minlength=num_prompts))
        found.append(
            Quality(
                num_blocks=len(recording),
                mean_predicted=float(p.mean()),
                mean_observed=float(o.mean()),
                ece=ece,
                ece_low=low,
                ece_high=high,
                ece_noise=noise,
                auc=area_under_curve(p, o),
                bins=_reliability(p, o),
            )
        )
    return found


def expected_calibration_error(predicted: Floats, observed: Floats) -> float:
    """Mean distance between predicted and observed over equal-width bins, weighted by their blocks."""
    gaps = np.bincount(_bin_of(predicted), weights=predicted - observed, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / max(len(predicted), 1))


def area_under_curve(predicted: Floats, observed: Floats) -> float:
    """P(an accepted prefix has the higher prediction), observed as a probability; 0.5 where one kind is missing."""
    order = np.argsort(predicted, kind="stable")
    values, positive = predicted[order], observed[order]
    negative = 1.0 - positive
    _, starts, inverse = np.unique(values, return_index=True, return_inverse=True)
    tied_negative = np.add.reduceat(negative, starts)
    below = np.concatenate(([0.0], np.cumsum(tied_negative)[:-1]))
    total = positive.sum() * negative.sum()
    return float((positive * (below + 0.5 * tied_negative)[inverse]).sum() / total) if total > 0 else 0.5


def _bin_of(predicted: Floats) -> NDArray[np.int64]:
    return np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)


def _gaps(predicted: Floats, observed: Floats, prompt_of: NDArray[np.int64], num_prompts: int) -> Floats:
    """Sums of predicted - observed by prompt and bin, [P, B]."""
    cells = prompt_of * NUM_BINS + _bin_of(predicted)
    sums = np.bincount(cells, weights=predicted - observed, minlength=num_prompts * NUM_BINS)
    return sums.reshape(num_prompts, NUM_BINS).astype(np.float64)


def _uncertainty(
    ece: float, draws: Floats, gaps: Floats, num_blocks: NDArray[np.int64]
) -> tuple[float | None, float | None, float | None]:
    """Interval of the error and mean of what chance alone shows.

    draws [S, P]: how often each resample holds a prompt; gaps [P, B]; num_blocks [P].
    """
    if not len(draws):
        return None, None, None
    total = np.maximum(draws @ num_blocks, 1)
    eces = np.abs(draws @ gaps).sum(axis=1) / total
    chance = np.abs(draws @ (gaps - gaps.mean(axis=0))).sum(axis=1) / total  # the same prompts without their error
    lowest, highest = np.quantile(eces, ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2))
    low = 0.0 if ece <= np.quantile(chance, COVERAGE) else max(2 * ece - float(highest), 0.0)
    return low, max(2 * ece - float(lowest), low), float(chance.mean())


def _reliability(predicted: Floats, observed: Floats) -> tuple[Bin, ...]:
    bins = _bin_of(predicted)
    counts = np.bincount(bins, minlength=NUM_BINS)
    sums = [np.bincount(bins, weights=values, minlength=NUM_BINS) for values in (predicted, observed)]
    return tuple(
        Bin(int(counts[at]), float(sums[0][at] / counts[at]), float(sums[1][at] / counts[at]))
        for at in np.flatnonzero(counts)
    )
