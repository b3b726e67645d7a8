"""The NumPy PrefixSelect and Algorithm 1: both on small cases, and the promise that keeps the output exact."""

from __future__ import annotations

import numpy as np
import pytest
from dspark_trt_plugins.prefix_select.reference import lagged_budget, survival

from tests.support.reference_scheduler import best_budget, early_stop

NONE_FORCED = np.zeros(8, bool)


def linear_step_ms(fixed_ms: float, token_ms: float, size: int = 200) -> np.ndarray:
    return fixed_ms + token_ms * np.arange(size)


def select(values: list[list[float]], step_ms: np.ndarray, **changes: object) -> list[int]:
    fresh = np.array(values)
    arguments = {
        "caps": np.full(len(values), fresh.shape[1]),
        "is_forced": NONE_FORCED[: len(values)],
        "prefill_tokens": 0,
    } | changes
    return early_stop(fresh, step_ms=step_ms, **arguments).tolist()  # type: ignore[arg-type]


def test_survival_is_the_running_product_of_calibrated_confidences() -> None:
    logits = np.array([[0.0, 2.0, -1.0]])
    expected = np.cumprod(1 / (1 + np.exp(-logits / np.array([1.0, 2.0, 0.5]))), axis=1)
    np.testing.assert_allclose(survival(logits, np.array([1.0, 2.0, 0.5])), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_survival_is_zero_from_a_non_finite_confidence_on(value: float) -> None:
    found = survival(np.array([[1.0, value, 5.0]]), np.ones(3))
    assert found[0, 0] > 0.7
    assert found[0, 1:].tolist() == [0, 0]


def test_survival_of_extreme_confidences_does_not_overflow() -> None:
    with np.errstate(over="raise", invalid="raise"):
        found = survival(np.array([[1e30, -1e30]], np.float32), np.array([1e-3, 1e-3]))
    assert found.tolist() == [[1, 0]]


def test_early_stop_admits_while_the_expected_throughput_rises() -> None:
    """Θ = 1/11, 1.9/12, 2.6/13, 2.9/14, 2.95/15: rises to three drafts, then falls."""
    assert select([[0.9, 0.7, 0.3, 0.05]], linear_step_ms(10, 1)) == [3]


def test_early_stop_stops_at_the_first_throughput_that_is_not_greater() -> None:
    """A fourth draft would pay on the flat part of the stair behind the step; it must not be looked at."""
    stair = np.array([0, 10, 10, 30, 30, 30, 30, 30.0])
    assert select([[0.9, 0.9, 0.9, 0.9]], stair) == [1]
    assert select([[0.0, 0.0]], np.full(8, 10.0)) == [0]  # equal throughput stops too


def test_early_stop_ranks_over_all_requests() -> None:
    assert select([[0.9, 0.2], [0.8, 0.7], [0.1, 0.05]], linear_step_ms(20, 2.5)) == [1, 2, 0]


def test_equal_survivals_are_admitted_by_draft_and_then_by_request() -> None:
    values = np.full((3, 2), 0.5)
    order = [
        lagged_budget(values, caps=np.full(3, 2), is_forced=NONE_FORCED[:3], num_admitted=k).tolist() for k in range(7)
    ]
    assert order == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]


def test_caps_are_never_exceeded_and_forced_requests_get_theirs() -> None:
    flat = np.full(50, 10.0)
    values = [[0.9, 0.9, 0.9]] * 3
    assert select(values, flat, caps=np.array([0, 2, 3])) == [0, 2, 3]
    rising = linear_step_ms(0.001, 10)
    assert select(values, rising, caps=np.array([3, 2, 3]), is_forced=np.array([False, True, False])) == [0, 2, 0]
    found = lagged_budget(
        np.array(values), caps=np.array([3, 2, 1]), is_forced=np.array([False, True, False]), num_admitted=3
    )
    assert found.tolist() == [2, 2, 1]


def test_prefill_tokens_and_forced_drafts_move_along_the_step_curve() -> None:
    """One more token costs nothing below 6 batch tokens and much above."""
    stair = np.where(np.arange(50) <= 6, 10.0, 100.0)
    assert select([[0.9, 0.8, 0.7]], stair) == [3]
    assert select([[0.9, 0.8, 0.7]], stair, prefill_tokens=4) == [1]
    two = [[0.9, 0.8, 0.7]] * 2
    assert select(two, stair, is_forced=np.array([True, False])) == [3, 1]


def test_best_budget_is_the_largest_throughput_of_all() -> None:
    """It looks behind the stair that early_stop stops at."""
    stair = np.array([0, 10, 16, 16, 16, 16])
    arguments = {"caps": np.array([4]), "is_forced": np.array([False]), "prefill_tokens": 0, "step_ms": stair}
    values = np.array([[0.5, 0.5, 0.5, 0.5]])
    assert early_stop(values, **arguments).tolist() == [0]
    assert best_budget(values, **arguments) == 4
    flat = arguments | {"step_ms": np.full(6, 10.0)}
    assert best_budget(np.array([[0.5, 0.0, 0.0, 0.0]]), **flat) == 1  # the smallest of equals


def test_admission_of_a_draft_does_not_change_with_later_confidences() -> None:
    random = np.random.default_rng(0)
    decisions = []
    for _ in range(500):
        num_requests, gamma = random.integers(1, 5), random.integers(2, 8)
        logits = random.normal(0.5, 1.5, (num_requests, gamma))
        step_ms = np.cumsum(random.choice([0.0, 0.3, 4.0], 100)) + 5
        request, draft = random.integers(num_requests), random.integers(gamma - 1)
        changed = logits.copy()
        changed[request, draft + 1 :] = random.normal(0, 4, gamma - draft - 1)
        common = {"caps": np.full(num_requests, gamma), "is_forced": random.random(num_requests) < 0.1}
        cost = {"prefill_tokens": int(random.integers(10)), "step_ms": step_ms}
        budget = int(random.integers(num_requests * gamma + 1))
        admitted = []
        for values in (logits, changed):
            fresh = survival(values, np.ones(gamma))
            admitted.append(early_stop(fresh, **common, **cost)[request] > draft)
            admitted.append(lagged_budget(fresh, **common, num_admitted=budget)[request] > draft)
        assert admitted[:2] == admitted[2:]
        decisions += admitted
    assert 0.2 < np.mean(decisions) < 0.8  # both outcomes were met


TARGET_PROBS = np.array([0.7, 0.3])
DRAFT_PROBS = np.array([0.5, 0.5])


def first_token_distribution(verify_len_after: list[int]) -> np.ndarray:
    """Law of the first output token, summed over both drafts x_1; `verify_len_after[x_1]` drafts are verified."""
    output = np.zeros(2)
    for token in range(2):
        if verify_len_after[token] == 0:
            output += DRAFT_PROBS[token] * TARGET_PROBS
            continue
        accepted = min(1.0, TARGET_PROBS[token] / DRAFT_PROBS[token])
        residual = np.maximum(TARGET_PROBS - DRAFT_PROBS, 0)
        output[token] += DRAFT_PROBS[token] * accepted
        output += DRAFT_PROBS[token] * (1 - accepted) * residual / residual.sum()
    return output


@pytest.mark.parametrize("second_token_ms", [10.0, 19.0])
def test_early_stop_does_not_bias_the_output_in_the_counterexample_of_appendix_a(second_token_ms: float) -> None:
    """Target 0.7/0.3, drafter 0.5/0.5, so c_1 = 0.8; c_2 is high after the first token and low after the second.

    One draft does not pay alone, two do where c_2 is high: a full search on fresh confidences verifies only after the
    first token and outputs 0.85/0.15.
    """
    step_ms = np.array([0, 10, second_token_ms, 19.0])
    blocks = [np.array([[0.8, 0.8 * 0.95]]), np.array([[0.8, 0.8 * 0.05]])]
    arguments = {"caps": np.array([2]), "is_forced": np.array([False]), "prefill_tokens": 0, "step_ms": step_ms}
    lengths = [int(early_stop(fresh, **arguments)[0]) for fresh in blocks]
    np.testing.assert_allclose(first_token_distribution(lengths), TARGET_PROBS)
    if second_token_ms == 19.0:
        searched = [best_budget(fresh, **arguments) for fresh in blocks]
        np.testing.assert_allclose(first_token_distribution(searched), [0.85, 0.15])
    else:
        assert min(lengths) >= 1  # the case is not only about verifying nothing
