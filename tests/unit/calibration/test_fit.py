"""Fits on synthetic blocks whose lines are known; the definitions of ECE and AUC."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark_trt.calibration.fit import (
    MIN_BLOCKS,
    MIN_SLOPE,
    area_under_curve,
    expected_calibration_error,
    fit,
    fit_temperatures,
    qualities,
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


def test_a_slot_that_nothing_reaches_stays_near_neutral() -> None:
    recording = blocks(4000)
    recording.acceptance[:, 0] = 0.0
    found = fit(recording)
    assert found.greedy.slopes[1:] == pytest.approx((1.0, 1.0))
    assert found.greedy.offsets[1:] == pytest.approx((0.0, 0.0))


def test_logits_that_are_no_numbers_do_not_spoil_a_fit() -> None:
    recording = blocks(4000)
    recording.confidence_logits[::50] = np.nan
    assert np.isfinite(fit(recording).greedy.slopes).all()


def test_temperatures_of_plain_scaling_are_found_again() -> None:
    known = Calibration.from_temperatures([2.0, 0.5])
    np.testing.assert_allclose(fit_temperatures(blocks(60_000, known)), [2.0, 0.5], rtol=0.2)


def test_lines_improve_what_is_held_out_and_say_by_how_much() -> None:
    found = fit(blocks(20_000, seed=1, is_greedy=True))
    held_out = blocks(20_000, seed=2, is_greedy=True)
    before, after = qualities(held_out, Calibration.from_temperatures([1.0] * 3)), qualities(held_out, found)
    for slot in range(3):
        assert after[slot].ece < 0.5 * before[slot].ece
        # a resample adds noise of its own, which ECE counts: the interval may lie above
        assert 0 <= after[slot].ece_low <= after[slot].ece_high
        assert after[slot].mean_predicted == pytest.approx(after[slot].mean_observed, abs=0.03)


def test_calibration_error_is_the_weighted_mean_distance_in_twenty_bins() -> None:
    predicted = np.array([0.01, 0.02, 0.51, 0.53, 1.0])
    observed = np.array([0.0, 1.0, 1.0, 1.0, 0.0])
    expected = (abs(0.03 - 1.0) + abs(1.04 - 2.0) + 1.0) / 5
    assert expected_calibration_error(predicted, observed) == pytest.approx(expected)
    assert expected_calibration_error(np.array([]), np.array([])) == 0.0


def test_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    predicted = np.array([0.1, 0.4, 0.4, 0.8, 0.9])
    observed = np.array([0.0, 1.0, 0.0, 0.0, 1.0])
    pairs = [
        1.0 if p > n else 0.5 if p == n else 0.0 for p in predicted[observed == 1] for n in predicted[observed == 0]
    ]
    assert area_under_curve(predicted, observed) == pytest.approx(np.mean(pairs))
    assert area_under_curve(predicted, np.ones(5)) == 0.5


def test_area_under_the_curve_counts_probabilities_as_shares_of_both_kinds() -> None:
    predicted, observed = np.array([0.2, 0.7]), np.array([0.25, 0.75])
    split = area_under_curve(np.repeat(predicted, 4), np.array([1, 0, 0, 0, 1, 1, 1, 0.0]))
    assert area_under_curve(predicted, observed) == pytest.approx(split)
