"""How verify lengths are chosen. That no choice looks ahead is in tests/property/runtime/test_admission.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.scheduler import SchedulerConfig, SchedulerMode
from dspark_trt.errors import RecipeError
from dspark_trt.runtime.prefix_scheduler import (
    Offer,
    admission_order,
    best_count,
    early_stop_count,
    survival_of,
)
from dspark_trt.runtime.survival_history import SurvivalHistory
from tests.support.schedulers import LogitScheduler


def logit(confidence: Any) -> np.ndarray:
    values = np.asarray(confidence, dtype=np.float64)
    return np.log(values / (1 - values)).astype(np.float32)


def confidence_of(logits: Any, temperatures: list[float]) -> np.ndarray:
    calibration = Calibration.from_temperatures(temperatures)
    return calibration.confidence(np.array(logits, dtype=np.float32), np.zeros(len(logits), bool))


def choose(
    mode: SchedulerMode,
    confidence: Any,
    *,
    step_ms: Any = None,
    caps: Any = None,
    is_forced: Any = None,
    num_requests: int | None = None,
    threshold: float | None = None,
    scheduler: LogitScheduler | None = None,
) -> list[int]:
    confidence = np.asarray(confidence, dtype=np.float64)
    num_drafting, gamma = confidence.shape
    caps = np.full(num_drafting, gamma) if caps is None else np.array(caps)
    scheduler = scheduler or LogitScheduler(SchedulerConfig(mode, threshold=threshold), [1.0] * gamma, num_rows=8)
    offer = Offer(
        rows=np.arange(num_drafting),
        generations=np.arange(num_drafting),
        caps=caps,
        is_forced=np.zeros(num_drafting, bool) if is_forced is None else np.array(is_forced),
        num_requests=num_requests or num_drafting,
        step_ms=None if step_ms is None else np.asarray(step_ms, dtype=np.float64),
        is_greedy=np.zeros(num_drafting, bool),
    )
    return scheduler.choose(logit(confidence), offer).tolist()


def test_off_and_fixed_verify_the_caps() -> None:
    assert choose("fixed", [[0.1] * 3, [0.9] * 3], caps=[2, 3]) == [2, 3]
    assert SchedulerConfig("off").max_verify_len(7) == 0
    assert SchedulerConfig("fixed").max_verify_len(7) == 7
    assert SchedulerConfig("fixed", verify_len=3).max_verify_len(7) == 3


def test_threshold_cuts_at_the_first_low_confidence_and_ignores_later_ones() -> None:
    confidence = [[0.9, 0.4, 0.9], [0.9, 0.9, 0.9], [0.4, 0.9, 0.9], [0.9, 0.9, 0.4]]
    assert choose("threshold", confidence, threshold=0.5) == [1, 3, 0, 2]
    assert choose("threshold", confidence, threshold=0.5, caps=[3, 2, 3, 1]) == [1, 2, 0, 1]


def test_early_stop_by_hand() -> None:
    """R = 2 at 10 ms and 1 ms more for every draft: throughput 2/10, 2.9/11, 3.7/12, 4.42/13, 4.74/14 (falls)."""
    confidence = [[0.9, 0.8, 0.4], [0.8, 0.4, 0.5]]
    assert choose("early_stop", confidence, step_ms=10 + np.arange(7)) == [2, 1]


def test_early_stop_stops_at_the_first_fall_even_if_more_drafts_would_pay() -> None:
    stairs = [10, 20, 20, 20, 20]
    assert choose("early_stop", [[0.9, 0.9, 0.9, 0.9]], step_ms=stairs) == [0]
    assert best_count(survival_of(np.full((1, 4), 0.9))[0], 1, np.array(stairs, dtype=np.float64)) == 4


def test_equal_throughput_stops() -> None:
    assert early_stop_count(np.array([0.5, 0.5]), 1.0, np.array([10.0, 15.0, 20.0])) == 0


def test_a_flat_table_verifies_everything() -> None:
    assert choose("early_stop", [[0.5] * 4, [0.01] * 4], step_ms=[10.0] * 9) == [4, 4]


def test_ties_go_to_the_earlier_slot_then_to_the_first_request() -> None:
    requests, values = admission_order(np.array([[0.5, 0.5], [0.5, 0.5], [0.9, 0.5]]), np.array([2, 2, 2]))
    assert requests.tolist() == [2, 0, 1, 0, 1, 2]
    assert values.tolist() == [0.9] + [0.5] * 5


def test_caps_bound_the_candidates() -> None:
    assert choose("early_stop", [[0.9] * 4, [0.9] * 4, [0.9] * 4], caps=[0, 1, 4], step_ms=[10.0] * 6) == [0, 1, 4]


def test_sts_temperatures_divide_the_logits_slot_by_slot() -> None:
    confidence = confidence_of([[2.0, 2.0, -3.0]], [1.0, 2.0, 0.5])
    assert confidence[0].tolist() == pytest.approx([1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(6))])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_confidence_is_survival_0_from_there_on(bad: float) -> None:
    assert survival_of(confidence_of([[3.0, bad, 3.0]], [1.0] * 3))[0, 1:].tolist() == [0, 0]


def test_huge_confidence_logits_do_not_overflow() -> None:
    with np.errstate(all="raise"):
        confidence = confidence_of([[3e38, -3e38]], [0.01, 0.01])
    assert confidence.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("mode", ["threshold", "early_stop", "lagged_budget"])
def test_forced_requests_are_verified_up_to_their_caps(mode: SchedulerMode) -> None:
    lens = choose(
        mode,
        [[0.01] * 4, [0.01] * 4, [0.01] * 4],
        caps=[4, 3, 4],
        is_forced=[True, True, False],
        step_ms=10 * (1 + np.arange(12)),
        threshold=0.5 if mode == "threshold" else None,
    )
    assert lens[:2] == [4, 3]
    if mode != "lagged_budget":
        assert lens[2] == 0


def test_lagged_budget_takes_k_from_two_steps_ago_and_ranks_by_fresh_confidences() -> None:
    scheduler = LogitScheduler(SchedulerConfig("lagged_budget"), [1.0, 1.0], num_rows=8)
    step_ms = [10, 11, 12, 13, 14]

    def step(confidence: Any) -> list[int]:
        return choose("lagged_budget", confidence, step_ms=step_ms, scheduler=scheduler)

    high, low = [[0.9, 0.9], [0.9, 0.9]], [[0.01, 0.01], [0.01, 0.01]]
    assert step(low) == [2, 2]  # no history: survival 1
    assert step(high) == [2, 2]
    assert step(high) == [0, 0]  # two steps ago everything was low
    assert step([[0.2, 0.2], [0.8, 0.7]]) == [2, 2]
    assert step([[0.3, 0.2], [0.8, 0.1]]) == [2, 2]
    assert step(high) == [1, 1]  # K = 2 of .8 .56 | .2 .04; at equal fresh survival first slots go first


def test_lagged_budget_gives_its_drafts_to_the_best_fresh_ones() -> None:
    scheduler = LogitScheduler(SchedulerConfig("lagged_budget"), [1.0, 1.0], num_rows=8)
    step_ms = [10, 11, 12, 30, 40]
    lens = [
        choose("lagged_budget", confidence, step_ms=step_ms, scheduler=scheduler)
        for confidence in ([[0.9, 0.1], [0.1, 0.1]], [[0.2, 0.1], [0.9, 0.8]], [[0.8, 0.1], [0.7, 0.1]])
    ]
    assert lens == [[1, 1], [0, 2], [1, 0]]  # K = 2 (no history), K = 2, K = 1 (two steps ago only one draft was good)


def exchange(history: SurvivalHistory, rows: np.ndarray, generations: np.ndarray, fresh: np.ndarray) -> np.ndarray:
    """One step of `lagged_budget`: read what is two steps old, hand in what is new."""
    stale = history.stale(rows, generations)
    history.record(rows, generations, fresh)
    return stale


def test_history_belongs_to_the_occupant_and_not_to_the_row() -> None:
    history = SurvivalHistory(num_rows=3, gamma=2, prior=np.ones((1, 2)))
    rows = np.array([0, 1])
    first = np.array([[0.5, 0.4], [0.3, 0.2]])
    exchange(history, rows, np.array([10, 11]), first)
    exchange(history, rows, np.array([10, 11]), first / 2)
    stale = exchange(history, rows, np.array([10, 99]), first)  # row 1 has a new occupant
    assert stale.tolist() == [[0.5, 0.4], [1.0, 1.0]]


def test_history_follows_a_moved_row() -> None:
    history = SurvivalHistory(num_rows=3, gamma=1, prior=np.ones((1, 1)))
    exchange(history, np.array([0, 2]), np.array([10, 12]), np.array([[0.5], [0.3]]))
    exchange(history, np.array([0, 2]), np.array([10, 12]), np.array([[0.6], [0.4]]))
    history.move(2, 0)
    assert exchange(history, np.array([0]), np.array([12]), np.array([[0.1]])).tolist() == [[0.3]]
    assert exchange(history, np.array([0]), np.array([12]), np.array([[0.1]])).tolist() == [[0.4]]


def test_a_step_without_drafts_of_a_request_leaves_it_without_history() -> None:
    history = SurvivalHistory(num_rows=2, gamma=1, prior=np.ones((1, 1)))
    both, only_first = np.array([0, 1]), np.array([0])
    exchange(history, both, np.array([1, 2]), np.array([[0.5], [0.5]]))
    exchange(history, only_first, np.array([1]), np.array([[0.5]]))
    exchange(history, both, np.array([1, 2]), np.array([[0.5], [0.5]]))
    assert exchange(history, both, np.array([1, 2]), np.array([[0.5], [0.5]])).tolist() == [[0.5], [1.0]]


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "unconstrained"},
        {"mode": "early_stop", "verify_len": 3},
        {"mode": "fixed", "verify_len": -1},
        {"mode": "threshold"},
        {"mode": "fixed", "threshold": 0.5},
        {"mode": "threshold", "threshold": 1.5},
    ],
)
def test_a_wrong_scheduler_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"^scheduler"):
        SchedulerConfig(**arguments)


@pytest.mark.parametrize("temperatures", [[1.0, 0.0], [1.0, float("nan")], [-1.0, 1.0]])
def test_wrong_confidence_temperatures_are_refused(temperatures: list[float]) -> None:
    with pytest.raises(RecipeError, match="confidence temperatures"):
        Calibration.from_temperatures(temperatures)


def test_a_verify_length_beyond_gamma_is_refused() -> None:
    with pytest.raises(RecipeError, match="at most gamma = 2 drafts, found fixed:3"):
        LogitScheduler(SchedulerConfig("fixed", verify_len=3), [1.0, 1.0], num_rows=1)
