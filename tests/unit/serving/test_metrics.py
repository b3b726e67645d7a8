"""Metrics: what the loop counted, once per step, across loops; and the scheduler's text form."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig, parse_scheduler
from dspark_trt.errors import RecipeError
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.serving.adapter import EngineRequest
from dspark_trt.serving.failures import Failure
from dspark_trt.serving.metrics import ServingMetrics
from dspark_trt.serving.ticket import Ticket
from tests.support.toy_engines import ToyDrafter, ToyLanguage, ToyTarget, make_loop

LIMITS = EngineLimits(max_requests=4, max_seq_len=64, max_batch_tokens=64)
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
        key = (self.name, " ".join(value for label, value in labels.items() if label != "model"))
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
        assert value >= 0
        VALUES[self._key] += 1


def new_loop() -> DecodingLoop:
    language = ToyLanguage(vocab_size=23)
    return make_loop(ToyTarget(language, LIMITS), ToyDrafter(language, LIMITS), SchedulerConfig("fixed", verify_len=3))


def request(request_id: str, num_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=num_tokens)
    )


def new_metrics() -> ServingMetrics:
    VALUES.clear()
    return ServingMetrics(
        MetricFamily, "dspark", max_requests=LIMITS.max_requests, max_seq_len=LIMITS.max_seq_len, gamma=5
    )


def test_metrics_are_the_loops_own_counts_and_go_on_with_a_new_loop() -> None:
    metrics = new_metrics()
    totals = []
    for _ in range(2):
        loop = new_loop()
        for index in range(6):
            loop.submit(request(str(index), 5 + index))
        loop.step()
        metrics.after_step(loop, 3, True)
        assert VALUES["dspark_requests_running", ""] == VALUES["dspark_max_requests", ""] == LIMITS.max_requests
        assert VALUES["dspark_requests_waiting", ""] == 2 + 3
        while loop.has_work:
            emissions = loop.step()
            metrics.after_step(loop, 0, any(emission.finish_reason for emission in emissions))
        totals.append(loop.totals)
    assert VALUES["dspark_tokens_total", ""] == sum(total.num_tokens_emitted for total in totals) == 2 * 45
    assert VALUES["dspark_prefill_tokens_total", ""] == 2 * 6 * 3
    num_steps = sum(total.num_steps for total in totals)
    assert VALUES["dspark_steps_total", ""] == num_steps == VALUES["dspark_step_seconds", ""]
    for state in ("proposed", "verified", "accepted"):
        expected = sum(getattr(total, f"num_drafts_{state}") for total in totals)
        assert VALUES["dspark_drafts_total", state] == expected > 0
    pruned = VALUES["dspark_drafts_total", "proposed"] - VALUES["dspark_drafts_total", "verified"]
    assert VALUES["dspark_drafts_total", "pruned"] == pruned
    assert VALUES["dspark_requests_running", ""] == VALUES["dspark_requests_waiting", ""] == 0


def test_error_of_a_price_is_observed_for_every_step_that_was_priced() -> None:
    metrics, loop = new_metrics(), new_loop()
    loop.submit(request("0", 12))
    num_priced = 0
    while loop.has_work:
        loop.step()
        metrics.after_step(loop, 0, True)
        num_priced += loop.last_step.num_requests > 0 and loop.last_step.expected_ms > 0
    assert VALUES["dspark_step_price_error_ratio", ""] == num_priced > 0


def test_step_without_work_is_not_counted() -> None:
    metrics, loop = new_metrics(), new_loop()
    loop.step()
    metrics.after_step(loop, 0, False)
    assert VALUES["dspark_steps_total", ""] == VALUES["dspark_step_seconds", ""] == 0


def ticket_of(loop: DecodingLoop, arrived_at: float) -> Ticket:
    generation = request("1", 9)
    engine_request = EngineRequest(generation, 1, "", is_streaming=True, echoes_prompt=False)
    loop.submit(generation)
    return Ticket(engine_request, None, None, arrived_at=arrived_at, ends_at=arrived_at + 60)  # type: ignore[arg-type]


def test_request_is_observed_once_at_its_end_with_the_outcome_that_it_had() -> None:
    metrics, loop = new_metrics(), new_loop()
    ticket = ticket_of(loop, arrived_at=100.0)
    metrics.admitted(ticket, 101.0)
    now = 101.0
    while loop.has_work:
        now += 0.5
        emissions = loop.step()
        metrics.after_step(loop, 0, True)  # the worker's order
        for emission in emissions:
            ticket.note_tokens(len(emission.token_ids), now)
            if emission.finish_reason:
                assert VALUES["dspark_kv_used_ratio", ""] > 0
                metrics.ended(ticket, emission, now)
    assert VALUES["dspark_requests_total", "length"] == 1
    for name in ("request", "time_to_first_token", "time_per_output_token", "longest_gap", "queue"):
        assert VALUES[f"dspark_{name}_seconds", ""] == 1, name
    assert VALUES["dspark_drafts_per_position_total", "verified 1"] > 0
    assert VALUES["dspark_drafts_per_position_total", "verified 4"] == 0, "fixed:3"
    assert VALUES["dspark_kv_used_ratio", ""] == 0


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (Failure.INVALID_ARG, "invalid"),
        (Failure.UNAVAILABLE, "refused"),
        (Failure.CANCELLED, "cancelled"),
        (Failure.TIMEOUT, "timeout"),
        (Failure.INTERNAL, "error"),
    ],
)
def test_request_that_never_ran_is_counted_by_why(failure: Failure, outcome: str) -> None:
    metrics = new_metrics()
    ticket = ticket_of(new_loop(), arrived_at=1.0)
    ticket.end_with(failure, "why")
    metrics.ended(ticket, None, 2.0)
    assert VALUES["dspark_requests_total", outcome] == 1
    assert VALUES["dspark_request_seconds", ""] == 0, "what did not run has no time"


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
