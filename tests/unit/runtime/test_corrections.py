"""What serving teaches is slow, bounded and two steps late."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dspark_trt.runtime.corrections import (
    ACCEPTANCE_RATE,
    LAG_STEPS,
    MAX_ACCEPTANCE_SHIFT,
    MAX_TIME_FACTOR,
    MAX_TIME_STEP,
    AcceptanceCorrection,
    Part,
    TimeCorrection,
)

GREEDY, SAMPLED = 0, 1


def observe(correction: AcceptanceCorrection, confidence: list[float], verify_len: int, num_accepted: int) -> None:
    """One greedy request."""
    correction.observe(np.array([confidence]), np.array([verify_len]), np.array([num_accepted]), np.array([True]))


def advance(correction: TimeCorrection | AcceptanceCorrection, num_steps: int = LAG_STEPS) -> None:
    for _ in range(num_steps):
        correction.advance()


def test_a_time_counts_two_steps_later_and_not_before() -> None:
    correction = TimeCorrection()
    correction.observe("verify", 4, expected_ms=10.0, seen_ms=11.0)
    advance(correction, LAG_STEPS - 1)
    assert correction.factor("verify", 4) == 1.0
    advance(correction, 1)
    assert correction.factor("verify", 4) > 1.0


def test_an_acceptance_counts_two_steps_later_and_not_before() -> None:
    correction = AcceptanceCorrection(2)
    observe(correction, [0.5, 0.5], verify_len=2, num_accepted=2)
    advance(correction, LAG_STEPS - 1)
    assert not correction.shifts.any()
    advance(correction, 1)
    assert (correction.shifts[GREEDY] > 0).all()


@pytest.mark.parametrize("seen_ms", [1e-6, 1e9])
def test_a_burst_of_noise_moves_a_price_by_no_more_than_its_bound(seen_ms: float) -> None:
    correction, burst = TimeCorrection(), 5
    for _ in range(burst):
        correction.observe("draft", 1, expected_ms=10.0, seen_ms=seen_ms)
        advance(correction, 1)
    advance(correction)
    assert abs(math.log(correction.factor("draft", 1))) == pytest.approx(burst * MAX_TIME_STEP)


@pytest.mark.parametrize("ratio", [0.01, 100.0])
def test_a_factor_ends_at_its_limit(ratio: float) -> None:
    correction = TimeCorrection()
    for _ in range(1000):
        correction.observe("verify", 8, expected_ms=10.0, seen_ms=10.0 * ratio)
        advance(correction, 1)
    assert correction.factor("verify", 8) == pytest.approx(MAX_TIME_FACTOR if ratio > 1 else 1 / MAX_TIME_FACTOR)


def test_prices_find_a_machine_that_is_slower_than_its_table() -> None:
    correction = TimeCorrection()
    for _ in range(400):
        correction.observe("verify", 8, expected_ms=10.0 * correction.factor("verify", 8), seen_ms=13.0)
        advance(correction, 1)
    assert correction.factor("verify", 8) == pytest.approx(1.3, rel=0.01)


def test_a_factor_belongs_to_its_part_and_its_request_counts() -> None:
    correction = TimeCorrection()
    correction.observe("verify", 5, expected_ms=10.0, seen_ms=20.0)
    advance(correction)
    assert correction.factor("verify", 7) > 1.0
    assert correction.factor("verify", 8) == correction.factor("verify", 3) == correction.factor("host", 5) == 1.0


def test_times_that_no_clock_gives_teach_nothing() -> None:
    correction = TimeCorrection()
    correction.observe("verify", 1, expected_ms=0.0, seen_ms=5.0)
    correction.observe("verify", 1, expected_ms=5.0, seen_ms=0.0)
    advance(correction)
    assert correction.factor("verify", 1) == 1.0


def test_off_means_off() -> None:
    times, acceptance = TimeCorrection(is_on=False), AcceptanceCorrection(2, is_on=False)
    times.observe("verify", 1, expected_ms=1.0, seen_ms=2.0)
    observe(acceptance, [0.1, 0.1], verify_len=2, num_accepted=2)
    advance(times)
    advance(acceptance)
    assert times.factor("verify", 1) == 1.0
    assert not acceptance.shifts.any()


def test_only_slots_behind_accepted_drafts_that_were_verified_tell_anything() -> None:
    correction = AcceptanceCorrection(4)
    observe(correction, [0.5, 0.5, 0.5, 0.5], verify_len=3, num_accepted=1)
    advance(correction)
    expected = ACCEPTANCE_RATE * np.array([0.5, -0.5, 0.0, 0.0])  # accepted, rejected, behind a rejection, unverified
    np.testing.assert_allclose(correction.shifts[GREEDY], expected)
    assert not correction.shifts[SAMPLED].any()


def test_shifts_end_at_their_limit() -> None:
    correction = AcceptanceCorrection(1)
    for _ in range(500):
        observe(correction, [0.9], verify_len=1, num_accepted=0)
        advance(correction, 1)
    assert correction.shifts[GREEDY, 0] == -MAX_ACCEPTANCE_SHIFT


def test_confidences_that_are_right_are_left_alone() -> None:
    correction, random = AcceptanceCorrection(1), np.random.default_rng(0)
    seen = []
    for accepted in random.random(4000) < 0.7:
        # the confidence in force, which the shift moves: sigmoid(logit(0.7) + shift)
        confidence = 1 / (1 + math.exp(-(math.log(0.7 / 0.3) + correction.shifts[GREEDY, 0])))
        observe(correction, [confidence], verify_len=1, num_accepted=int(accepted))
        advance(correction, 1)
        seen.append(correction.shifts[GREEDY, 0])
    assert abs(float(np.mean(seen))) < 0.1


def served(times: TimeCorrection, part: Part, seen_ms: float, num_steps: int) -> None:
    """Steps that take seen_ms where the table says 10."""
    for _ in range(num_steps):
        times.advance()
        times.observe(part, 4, expected_ms=10.0 * times.factor(part, 4), seen_ms=seen_ms)


def test_drafts_that_cost_more_than_the_table_says_become_dearer_than_plain_steps() -> None:
    times = TimeCorrection()
    for _ in range(200):
        served(times, "verify", 10.0, 2)
        served(times, "verify_drafts", 12.0, 2)
    assert times.factor("verify", 4) == pytest.approx(1.0, abs=0.03)
    assert times.factor("verify_drafts", 4) == pytest.approx(1.2, abs=0.05)


def test_a_host_that_became_slower_makes_drafts_no_dearer_than_plain_steps() -> None:
    times = TimeCorrection()
    served(times, "verify_drafts", 12.0, 4000)
    assert times.factor("verify", 4) == pytest.approx(1.2, abs=0.03)
    assert times.factor("verify_drafts", 4) == pytest.approx(1.2, abs=0.05)


def test_drafts_that_were_dear_are_tried_again_in_the_end() -> None:
    times = TimeCorrection()
    served(times, "verify_drafts", 20.0, 40)
    dear = times.factor("verify_drafts", 4) / times.factor("verify", 4)
    served(times, "verify", 10.0, 2000)
    assert 1.0 < times.factor("verify_drafts", 4) / times.factor("verify", 4) < dear**0.1
