"""Fits what turns confidence logits into probabilities.

Shape letters: `N` blocks, `G` gamma. Source: paper section 3.2.1 (Sequential Temperature Scaling).

A confidence is conditional: slot j's matters where the drafts before it are accepted. So each block counts for slot j
with the probability that its first j - 1 drafts are, and slots are fitted from left to right.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dspark_trt.calibration.quality import expected_calibration_error
from dspark_trt.calibration.record import Recording
from dspark_trt.contract.calibration import Calibration, SlotCalibration, typical_blocks

Floats = NDArray[np.float64]

MIN_BLOCKS = 400  # of a regime; with fewer it takes the lines of all blocks; of all, with fewer they stay neutral
MIN_REACHING = 50  # blocks whose drafts before a slot are accepted; with fewer the slot stays neutral
MIN_SLOPE = 0.02
TEMPERATURES = np.exp(np.linspace(np.log(0.2), np.log(8.0), 80))
_RIDGE = 1e-3  # pulls a slot that hardly anything reaches towards slope 1, offset 0
_NUM_NEWTON_STEPS = 30


def fit(recording: Recording) -> Calibration:
    """Lines for greedy requests and for those that sample, each from its own blocks where they are enough, else from
    all of them."""
    gamma = recording.confidence_logits.shape[1]
    if len(recording) < MIN_BLOCKS:
        return Calibration.from_temperatures([1.0] * gamma)
    parts = [recording.chosen(of_regime) for of_regime in (recording.is_greedy, ~recording.is_greedy)]
    greedy, sampled = (_fit_lines(part if len(part) >= MIN_BLOCKS else recording) for part in parts)
    observed = np.cumprod(recording.acceptance, axis=1).mean(axis=0)
    fitted = Calibration(greedy, sampled, survival=tuple(observed.tolist()))
    predicted = np.cumprod(
        fitted.confidence(recording.confidence_logits, recording.is_greedy), axis=1, dtype=np.float64
    )
    return replace(fitted, blocks=tuple(tuple(block) for block in typical_blocks(predicted).tolist()))


def fit_temperatures(recording: Recording) -> list[float]:
    """T_j of plain Sequential Temperature Scaling: left to right, the smallest cumulative ECE on a grid.

    1 for a slot that too few blocks reach.
    """
    enough = reaching(recording) >= MIN_REACHING
    logits = recording.confidence_logits.astype(np.float64)
    predicted, observed = np.ones(len(recording)), np.ones(len(recording))
    temperatures = []
    for slot in range(logits.shape[1]):
        observed = observed * recording.acceptance[:, slot]
        grid = TEMPERATURES if enough[slot] else np.ones(1)
        candidates = [predicted * _sigmoid(logits[:, slot] / temperature) for temperature in grid]
        best = int(np.argmin([expected_calibration_error(each, observed) for each in candidates]))
        predicted = candidates[best]
        temperatures.append(float(grid[best]))
    return temperatures


def reaching(recording: Recording) -> Floats:
    """Blocks that tell of each slot, [G]: the expected number of those whose drafts before it are accepted."""
    before = np.cumprod(recording.acceptance[:, :-1], axis=1).sum(axis=0)
    return np.concatenate(([float(len(recording))], before))


def _fit_lines(recording: Recording) -> SlotCalibration:
    slopes, offsets = [], []
    reached = np.ones(len(recording))
    for slot in range(recording.confidence_logits.shape[1]):
        logits = recording.confidence_logits[:, slot].astype(np.float64)
        labels = recording.acceptance[:, slot]
        slope, offset = _logistic(logits, labels, reached) if reached.sum() >= MIN_REACHING else (1.0, 0.0)
        slopes.append(slope)
        offsets.append(offset)
        reached = reached * labels
    return SlotCalibration(tuple(slopes), tuple(offsets))


def _logistic(logits: Floats, labels: Floats, weights: Floats) -> tuple[float, float]:
    """Weighted logistic regression on one feature: Newton's method, a ridge towards (1, 0), slope kept positive."""
    is_finite = np.isfinite(logits)
    features = np.stack([np.where(is_finite, logits, 0.0), np.ones(len(logits))], axis=1)
    weights = weights * is_finite
    prior = np.array([1.0, 0.0])
    line = prior.copy()
    strength = _RIDGE * max(len(logits), 1)
    for _ in range(_NUM_NEWTON_STEPS):
        predicted = _sigmoid(features @ line)
        gradient = features.T @ (weights * (predicted - labels)) + strength * (line - prior)
        curvature = (features * (weights * predicted * (1 - predicted))[:, None]).T @ features + strength * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        line = line - np.clip(step, -2.0, 2.0)
        if np.abs(step).max() < 1e-8:
            break
    return max(float(line[0]), MIN_SLOPE), float(line[1])


def _sigmoid(x: Floats) -> Floats:
    result: Floats = np.tanh(0.5 * x) * 0.5 + 0.5
    return result
