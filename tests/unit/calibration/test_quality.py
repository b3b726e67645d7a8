"""ECE, its interval and noise, AUC and reliability bins, against their definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark_trt.calibration.fit import fit
from dspark_trt.calibration.quality import area_under_curve, expected_calibration_error, qualities
from dspark_trt.contract.calibration import Calibration
from tests.unit.calibration.test_fit import KNOWN, blocks


def test_lines_improve_what_is_held_out_and_say_by_how_much() -> None:
    found = fit(blocks(20_000, seed=1, is_greedy=True))
    held_out = blocks(20_000, seed=2, is_greedy=True)
    before, after = qualities(held_out, Calibration.from_temperatures([1.0] * 3)), qualities(held_out, found)
    for slot in range(3):
        assert after[slot].ece < 0.5 * before[slot].ece
        assert 0 <= after[slot].ece_low <= after[slot].ece_high < before[slot].ece_low
        assert after[slot].mean_predicted == pytest.approx(after[slot].mean_observed, abs=0.03)


@pytest.mark.parametrize("calibration", [Calibration.from_temperatures([1.0] * 3), KNOWN])
def test_interval_covers_the_error_behind_the_noise(calibration: Calibration) -> None:
    """The error of 100,000 blocks, within the intervals of 3,000; percentiles of the resamples never cover it."""
    truth = [each.ece for each in qualities(blocks(100_000, seed=99), calibration)]
    hits = np.zeros(3)
    for seed in range(20):
        found = qualities(blocks(3000, seed=seed), calibration)
        hits += [each.ece_low <= known <= each.ece_high for each, known in zip(found, truth, strict=True)]
    assert (hits >= 15).all()


def test_noise_is_the_mean_error_of_predictions_without_any() -> None:
    found = [qualities(blocks(4000, seed=seed), KNOWN) for seed in range(20)]
    for slot in range(3):
        shown = np.mean([each[slot].ece for each in found])
        said = np.mean([each[slot].ece_noise for each in found])
        assert said == pytest.approx(shown, rel=0.15)


def test_prompts_are_the_sample_so_like_blocks_widen_interval_and_noise() -> None:
    recording = blocks(2000)
    alone = qualities(replace(recording, groups=np.arange(2000)), KNOWN)[0]
    repeated = recording.chosen(np.arange(2000) < 40)
    many = replace(
        repeated,
        **{name: np.repeat(getattr(repeated, name), 50, axis=0) for name in ("confidence_logits", "acceptance")},
        **{name: np.repeat(getattr(repeated, name), 50, axis=0) for name in ("draft_ids", "is_greedy", "target_ids")},
        groups=np.repeat(np.arange(40), 50),
    )
    alike = qualities(many, KNOWN)[0]
    assert alike.num_blocks == alone.num_blocks == 2000
    assert alike.ece_noise > 3 * alone.ece_noise


def test_a_single_prompt_has_no_interval() -> None:
    found = qualities(replace(blocks(100), groups=np.zeros(100, np.int64)), KNOWN)[0]
    assert (found.ece_low, found.ece_high, found.ece_noise) == (None, None, None)


def test_bins_hold_every_block_and_give_the_ece_again() -> None:
    for found in qualities(blocks(3000), KNOWN):
        assert sum(each.num_blocks for each in found.bins) == found.num_blocks == 3000
        gaps = sum(each.num_blocks * abs(each.predicted - each.observed) for each in found.bins)
        assert gaps / 3000 == pytest.approx(found.ece)


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
