"""runtime/prefix_scheduler chooses exactly what Algorithm 1 and PrefixSelect's NumPy reference choose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dspark_trt_plugins.prefix_select.reference import lagged_budget, survival

from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.prefix_scheduler import Offer
from tests.support.reference_scheduler import best_budget, early_stop
from tests.support.schedulers import LogitScheduler

GAMMA = 7


class Step:
    """One random step: some requests drafted, others decode or prefill only."""

    def __init__(self, random: np.random.Generator, num_drafted: int) -> None:
        # few distinct values, so that equal survivals are met often
        self.confidence_logits = random.choice([-2.0, -0.5, 0.0, 1.0, 3.0], (num_drafted, GAMMA)).astype(np.float32)
        self.confidence_logits[random.random((num_drafted, GAMMA)) < 0.02] = random.choice([np.nan, np.inf, -np.inf])
        self.caps = random.integers(0, GAMMA + 1, num_drafted)
        self.is_forced = random.random(num_drafted) < 0.2
        self.num_undrafted = int(random.integers(0, 4))
        self.prefill_tokens = int(random.integers(0, 40))
        size = self.prefill_tokens + num_drafted + self.num_undrafted + int(self.caps.sum()) + 1
        stairs = random.choice([0.0, 0.0, 0.4, 3.0], size)
        self.step_ms = np.cumsum(stairs) + random.choice([1.0, 5.0, 40.0])

    def requests(self) -> dict[str, Any]:
        """Arguments of the reference: a request without drafts is one whose cap is 0."""
        none = self.num_undrafted
        return {
            "caps": np.append(self.caps, np.zeros(none, np.int64)),
            "is_forced": np.append(self.is_forced, np.zeros(none, bool)),
        }

    def padded(self, values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.ones((self.num_undrafted, GAMMA))])

    def by_runtime(self, scheduler: LogitScheduler, rows: np.ndarray, generations: np.ndarray) -> list[int]:
        num_requests = len(self.caps) + self.num_undrafted
        first = self.prefill_tokens + num_requests
        offer = Offer(
            rows=rows,
            generations=generations,
            caps=self.caps,
            is_forced=self.is_forced,
            num_requests=num_requests,
            step_ms=self.step_ms[first : first + int(self.caps.sum()) + 1],
            is_greedy=np.zeros(len(self.caps), bool),
        )
        return scheduler.choose(self.confidence_logits, offer).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_early_stop_equals_the_reference(seed: int) -> None:
    random = np.random.default_rng(seed)
    temperatures = random.uniform(0.5, 2, GAMMA)
    scheduler = LogitScheduler(SchedulerConfig("early_stop"), list(temperatures), num_rows=16)
    admitted = 0
    for _ in range(50):
        step = Step(random, int(random.integers(1, 12)))
        count = len(step.caps)
        fresh = step.padded(survival(step.confidence_logits, temperatures))
        expected = early_stop(fresh, **step.requests(), prefill_tokens=step.prefill_tokens, step_ms=step.step_ms)
        found = step.by_runtime(scheduler, np.arange(count), np.zeros(count, np.int64))
        assert found == expected[:count].tolist()
        admitted += sum(found)
    assert admitted > 100


@pytest.mark.parametrize("seed", range(8))
def test_lagged_budget_equals_the_reference_on_survivals_two_steps_old(seed: int) -> None:
    random = np.random.default_rng(seed)
    temperatures = random.uniform(0.5, 2, GAMMA)
    scheduler = LogitScheduler(SchedulerConfig("lagged_budget"), list(temperatures), num_rows=16)
    rows = random.permutation(16)[: int(random.integers(1, 12))]
    history = [np.ones((len(rows), GAMMA))] * 2  # requests without history count as survival 1
    for _ in range(50):
        step = Step(random, len(rows))
        fresh = survival(step.confidence_logits, temperatures)
        stale = step.padded(history[-2])
        arguments = step.requests()
        budget = best_budget(stale, **arguments, prefill_tokens=step.prefill_tokens, step_ms=step.step_ms)
        expected = lagged_budget(step.padded(fresh), **arguments, num_admitted=budget)
        found = step.by_runtime(scheduler, rows, np.arange(len(rows)))
        assert found == expected[: len(rows)].tolist()
        history.append(fresh)
