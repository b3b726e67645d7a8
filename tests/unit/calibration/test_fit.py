"""Fits on synthetic blocks whose lines are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark_trt.calibration.fit import (
    MIN_BLOCKS,
    MIN_REACHING,
    MIN_SLOPE,
    fit,
    fit_temperatures,
    reaching,
)
from dspark_trt.calibration.record import Recording
from dspark_trt.contract.calibration import Calibration, SlotCalibration

GREEDY = SlotCalibration((0.5, 1.5, 0.8), (0.3, -0.7, 0.2))
SAMPLED = SlotCalibration((2.0, 0.7, 1.0), (-0.5, 0.4, 0.0))
KNOWN = Calibration(GREEDY, SAMPLED)


def blocks(
    num_blocks: int, calibration: Calibration = KNOWN, *, seed: int = 0, is_greedy: bool | None = None
) -> Recording:
    """Blocks of 50 prompts whose acceptance has the probability that `calibration` gives; half of them greedy."""
    random = np.random.default_rng(seed)
    logits = random.normal(0.5, 1.5, (num_blocks, calibration.gamma)).astype(np.float32)
    greedy = np.arange(num_blocks) % 2 == 0 if is_greedy is None else np.full(num_blocks, is_greedy)
    accepted = random.random(logits.shape) < calibration.confidence(logits, greedy)
    return Recording(
        confidence_logits=logits,
        acceptance=accepted.astype(float),
        draft_ids=np.zeros(logits.shape, np.int64),
        is_greedy=greedy,
        groups=np.arange(num_blocks) * 50 // num_blocks,
        target_ids=np.zeros(num_blocks, np.int64),
    )


def test_known_lines_are_found_again_for_each_regime() -> None:
    found = fit(blocks(40_000))
    for line, known in ((found.greedy, GREEDY), (found.sampled, SAMPLED)):
        np.testing.assert_allclose(line.slopes, known.slopes, rtol=0.15)
        np.testing.assert_allclose(line.offsets, known.offsets, atol=0.15)
    expected = np.cumprod(blocks(40_000).acceptance, axis=1).mean(axis=0)
    np.testing.assert_allclose(found.survival, expected)


def test_the_order_of_confidences_is_kept_even_where_logits_mislead() -> None:
    recording = blocks(4000)
    found = fit(replace(recording, confidence_logits=-recording.confidence_logits))
    assert min(found.greedy.slopes + found.sampled.slopes) >= MIN_SLOPE
    logits = np.linspace(-5, 5, 40, dtype=np.float32)[:, None].repeat(3, axis=1)
    for greedy in (True, False):
        assert (np.diff(found.confidence(logits, np.full(40, greedy)), axis=0) > 0).all()


def test_too_few_blocks_leave_confidences_as_they_are() -> None:
    found = fit(blocks(MIN_BLOCKS - 1, is_greedy=True))
    neutral = Calibration.from_temperatures([1.0] * 3)
    assert (found.greedy, found.sampled, found.survival) == (neutral.greedy, neutral.sampled, ())


def test_a_regime_without_blocks_takes_the_lines_of_the_other() -> None:
    found = fit(blocks(4000, is_greedy=True))
    assert found.sampled == found.greedy != Calibration.from_temperatures([1.0] * 3).greedy


def test_two_regimes_with_too_few_blocks_each_are_fitted_together() -> None:
    """Once both stayed neutral and were called fitted."""
    recording = blocks(MIN_BLOCKS + 100)
    found = fit(recording)
    assert found.sampled == found.greedy != Calibration.from_temperatures([1.0] * 3).greedy
    confidence = found.confidence(recording.confidence_logits, recording.is_greedy)
    assert confidence[:, 0].mean() == pytest.approx(recording.acceptance[:, 0].mean(), abs=0.01)


def test_a_slot_that_nothing_reaches_stays_near_neutral() -> None:
    recording = blocks(4000)
    recording.acceptance[:, 0] = 0.0
    found = fit(recording)
    assert found.greedy.slopes[1:] == pytest.approx((1.0, 1.0))
    assert found.greedy.offsets[1:] == pytest.approx((0.0, 0.0))


def test_slot_that_too_few_blocks_reach_stays_neutral_and_the_others_are_fitted() -> None:
    recording = blocks(4000, is_greedy=True)
    recording.acceptance[MIN_REACHING - 5 :, 1] = 0.0
    found = fit(recording)
    assert (found.greedy.slopes[2], found.greedy.offsets[2]) == (1.0, 0.0)
    assert found.greedy.slopes[0] != 1.0
    temperatures = fit_temperatures(recording)
    assert temperatures[2] == 1.0 != temperatures[0]
    before = recording.acceptance[:, 0] * recording.acceptance[:, 1]
    np.testing.assert_allclose(reaching(recording), [4000, recording.acceptance[:, 0].sum(), before.sum()])


def test_logits_that_are_no_numbers_do_not_spoil_a_fit() -> None:
    recording = blocks(4000)
    recording.confidence_logits[::50] = np.nan
    assert np.isfinite(fit(recording).greedy.slopes).all()


def test_temperatures_of_plain_scaling_are_found_again() -> None:
    known = Calibration.from_temperatures([2.0, 0.5])
    np.testing.assert_allclose(fit_temperatures(blocks(60_000, known)), [2.0, 0.5], rtol=0.2)
