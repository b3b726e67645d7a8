"""Metrics: what the loop counted, once per step, across loops; and the scheduler's text form."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig, parse_scheduler
from dspark_trt.errors import RecipeError
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.serving.metrics import ServingMetrics
from tests.support.toy_engines import ToyDrafter, ToyLanguage, ToyTarget, make_loop

LIMITS = EngineLimits(max_slots=4, max_seq_len=64, max_batch_tokens=64)
VALUES: dict[tuple[str, str], float] = {}


class MetricFamily:
    """The interface of Triton's, kept in a dictionary. A name may be registered once only."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        assert name not in {known for known, _ in VALUES}
        assert description
        self.name, self.kind = name, kind

    def Metric(self, *, labels: dict[str, str], buckets: list[float] | None = None) -> Any:
        assert (buckets is not None) == (self.kind == self.HISTOGRAM)
        key = (self.name, labels.get("state") or labels.get("reason") or "")
        assert labels["model"] == "dspark"
        VALUES[key] = 0.0
        return Metric(key, self.kind)


class Metric:
    def __init__(self, key: tuple[str, str], kind: str) -> None:
        self._key, self._kind = key, kind

    def increment(self, value: float) -> None:
        assert self._kind == MetricFamily.COUNTER
        assert value > 0, "a counter never falls"
        VALUES[self._key] += value

    def set(self, value: float) -> None:
        assert self._kind == MetricFamily.GAUGE
        VALUES[self._key] = value

    def observe(self, value: float) -> None:
        assert self._kind == MetricFamily.HISTOGRAM
        assert value > 0
        VALUES[self._key] += 1


def new_loop() -> DecodingLoop:
    language = ToyLanguage(vocab_size=23)
    return make_loop(ToyTarget(language, LIMITS), ToyDrafter(language, LIMITS), SchedulerConfig("fixed", verify_len=3))


def request(request_id: str, num_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=num_tokens)
    )


def test_metrics_are_the_loops_own_counts_and_go_on_with_a_new_loop() -> None:
    VALUES.clear()
    metrics = ServingMetrics(MetricFamily, "dspark")
    totals = []
    for _ in range(2):
        loop = new_loop()
        for index in range(6):
            loop.submit(request(str(index), 5 + index))
        loop.step()
        metrics.after_step(loop)
        assert VALUES["dspark_requests", "active"] == LIMITS.max_slots
        assert VALUES["dspark_requests", "waiting"] == 2
        while loop.has_work:
            loop.step()
            metrics.after_step(loop)
        totals.append(loop.totals)
    assert VALUES["dspark_tokens_total", ""] == sum(total.num_tokens_emitted for total in totals) == 2 * 45
    assert VALUES["dspark_prefill_tokens_total", ""] == 2 * 6 * 3
    assert VALUES["dspark_steps_total", ""] == sum(total.num_steps for total in totals) == VALUES["dspark_step_ms", ""]
    assert VALUES["dspark_finished_total", "length"] == 12
    assert VALUES["dspark_finished_total", "error"] == 0
    for state in ("proposed", "verified", "accepted"):
        expected = sum(getattr(total, f"num_drafts_{state}") for total in totals)
        assert VALUES["dspark_drafts_total", state] == expected > 0
    assert VALUES["dspark_requests", "active"] == VALUES["dspark_requests", "waiting"] == 0


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("early_stop", SchedulerConfig("early_stop")),
        ("lagged_budget", SchedulerConfig("lagged_budget")),
        ("off", SchedulerConfig("off")),
        ("fixed", SchedulerConfig("fixed")),
        ("fixed:3", SchedulerConfig("fixed", verify_len=3)),
        ("threshold:0.4", SchedulerConfig("threshold", threshold=0.4)),
    ],
)
def test_scheduler_text(text: str, config: SchedulerConfig) -> None:
    assert parse_scheduler(text) == config


@pytest.mark.parametrize("text", ["", "fast", "fixed:", "fixed:x", "fixed:-1", "off:1", "threshold", "threshold:2"])
def test_scheduler_text_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="scheduler"):
        parse_scheduler(text)
