"""What is served, as Triton metrics; which ones there are is in `metric_families`.

The factory is `triton_python_backend_utils.MetricFamily`, handed in by the model. Each call of a metric costs about 10
µs in Triton's stub, so counters are brought up to date when a request ends and else a few times a second, and what
belongs to a request is observed once, at its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.metrics import RequestStatistics, StepRecord
from dspark_trt.serving.failures import Failure
from dspark_trt.serving.metric_families import COUNTERS, GAUGES, HISTOGRAMS, LOOP_COUNTERS
from dspark_trt.serving.ticket import Ticket

_UPDATE_INTERVAL_S = 0.2

# How a request can end: by itself, or for a reason of ours or of its client.
_OUTCOMES = {
    Failure.INVALID_ARG: "invalid",
    Failure.INTERNAL: "error",
    Failure.CANCELLED: "cancelled",
    Failure.UNAVAILABLE: "refused",
    Failure.TIMEOUT: "timeout",
}
OUTCOMES = ("stop", "length", *_OUTCOMES.values())


class ServingMetrics:
    """The metrics of one engine model; the `Observer` of its worker."""

    def __init__(
        self,
        metric_family: Any,
        model_name: str,
        *,
        max_requests: int,
        max_seq_len: int,
        gamma: int,
        table_made_at: datetime | None = None,
    ) -> None:
        """`metric_family` has the interface of `triton_python_backend_utils.MetricFamily`."""
        self._families: dict[str, Any] = {}  # a metric lives as long as its family

        def metric(name: str, description: str, kind: Any, labels: dict[str, str], **options: Any) -> Any:
            if name not in self._families:
                self._families[name] = metric_family(name=name, description=description, kind=kind)
            return self._families[name].Metric(labels={"model": model_name, **labels}, **options)

        def counter(name: str, **labels: str) -> Any:
            return metric(name, COUNTERS[name], metric_family.COUNTER, labels)

        self._counters = [
            (metric(name, text, metric_family.COUNTER, labels), read) for name, text, labels, read in LOOP_COUNTERS
        ]
        self._outcomes = {outcome: counter("dspark_requests_total", outcome=outcome) for outcome in OUTCOMES}
        self._per_position = {
            state: [
                counter("dspark_drafts_per_position_total", state=state, position=str(position))
                for position in range(1, gamma + 1)
            ]
            for state in ("verified", "accepted")
        }
        self._step_parts = {
            part: counter("dspark_step_part_seconds_total", part=part)
            for part in ("ingest", "draft", "verify", "copy", "host")
        }
        self._priced = {
            kind: counter("dspark_step_price_seconds_total", kind=kind) for kind in ("predicted", "measured")
        }
        self._undrafted_requests = counter("dspark_requests_without_drafts_total")
        self._histograms = {
            name: metric(name, text, metric_family.HISTOGRAM, {}, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._gauges = {name: metric(name, text, metric_family.GAUGE, {}) for name, text in GAUGES.items()}
        self._gauges["dspark_max_requests"].set(max_requests)
        self._num_positions = max_requests * max_seq_len
        self._table_made_at = table_made_at
        self._loop: DecodingLoop | None = None
        self._known = [0.0] * len(self._counters)  # values of the loop's totals that were added
        self._pending: dict[int, tuple[Any, float]] = {}  # counters and what is to be added, by identity
        self._next_update = 0.0
        self._live: dict[str, Ticket] = {}

    def after_step(self, loop: DecodingLoop, num_waiting: int, has_ended: bool) -> None:
        """Add what the last step changed. A new loop starts its totals at 0. `has_ended`: a request did with it."""
        if loop is not self._loop:
            self._loop, self._known = loop, [0.0] * len(self._counters)
        self._observe_step(loop.last_step)
        now = time.monotonic()
        if not has_ended and now < self._next_update:
            return
        self._next_update = now + _UPDATE_INTERVAL_S
        for index, (metric, read) in enumerate(self._counters):
            total = read(loop.totals)
            if total != self._known[index]:
                metric.increment(total - self._known[index])
                self._known[index] = total
        for metric, seconds in self._pending.values():
            metric.increment(seconds)
        self._pending.clear()
        self._gauges["dspark_requests_running"].set(loop.num_running)
        self._gauges["dspark_requests_waiting"].set(loop.num_queued + num_waiting)
        self._gauges["dspark_kv_used_ratio"].set(self._kv_used())
        if self._table_made_at is not None:
            age = datetime.now(self._table_made_at.tzinfo) - self._table_made_at
            self._gauges["dspark_step_table_age_seconds"].set(age.total_seconds())

    def admitted(self, ticket: Ticket, now: float) -> None:
        self._live[ticket.request_id] = ticket
        self._histograms["dspark_queue_seconds"].observe(now - ticket.arrived_at)

    def ended(self, ticket: Ticket, emission: Emission | None, now: float) -> None:
        """A request has no further answer. What it took is observed where it ran to its end."""
        if self._live.pop(ticket.request_id, None) is not None:  # the last step may have been the last one for long
            self._gauges["dspark_kv_used_ratio"].set(self._kv_used())
        outcome = _OUTCOMES[ticket.ending[0]] if ticket.ending else (emission and emission.finish_reason) or "error"
        self._outcomes[outcome].increment(1)
        if emission is None or emission.statistics is None:
            return
        statistics = emission.statistics
        for state, per_position in (
            ("verified", statistics.verified_per_position),
            ("accepted", statistics.accepted_per_position),
        ):
            for metric, num_drafts in zip(self._per_position[state], per_position, strict=False):
                if num_drafts:
                    metric.increment(num_drafts)
        if not statistics.num_drafts_verified and statistics.num_steps:
            self._undrafted_requests.increment(1)
        if ticket.ending is None:
            for name, value in _of_request(ticket, statistics, now):
                self._histograms[name].observe(value)

    def _observe_step(self, record: StepRecord) -> None:
        if not record.batch_tokens:  # nothing to do, or it failed before the engine was asked
            return
        self._histograms["dspark_step_seconds"].observe(record.total_ms / 1e3)
        self._histograms["dspark_batch_tokens"].observe(record.batch_tokens)
        for part, milliseconds in (
            ("ingest", record.ingest_ms),
            ("draft", record.draft_ms),
            ("verify", record.verify_ms),
            ("copy", record.copy_ms),
            ("host", record.outside_ms),
        ):
            self._later(self._step_parts[part], milliseconds / 1e3)
        if not record.num_requests:
            return
        self._histograms["dspark_verify_len"].observe(record.num_drafts_verified / record.num_requests)
        if record.expected_ms:
            self._later(self._priced["predicted"], record.expected_ms / 1e3)
            self._later(self._priced["measured"], record.total_ms / 1e3)
            self._histograms["dspark_step_price_error_ratio"].observe(abs(record.expected_ms / record.total_ms - 1))

    def _later(self, metric: Any, value: float) -> None:
        if value > 0:
            _, known = self._pending.get(id(metric), (metric, 0.0))
            self._pending[id(metric)] = (metric, known + value)

    def _kv_used(self) -> float:
        used = sum(
            len(ticket.request.generation_request.prompt_ids) + ticket.num_tokens for ticket in self._live.values()
        )
        return min(used / self._num_positions, 1.0)


def _of_request(ticket: Ticket, statistics: RequestStatistics, now: float) -> Iterator[tuple[str, float]]:
    yield "dspark_request_seconds", now - ticket.arrived_at
    yield "dspark_prompt_tokens", statistics.num_prompt_tokens
    yield "dspark_output_tokens", statistics.num_generated_tokens
    if statistics.num_steps:
        yield "dspark_accepted_len", statistics.accepted_len
    if ticket.first_token_at is None:
        return
    yield "dspark_time_to_first_token_seconds", ticket.first_token_at - ticket.arrived_at
    if statistics.num_generated_tokens > 1:
        span = ticket.last_token_at - ticket.first_token_at
        yield "dspark_time_per_output_token_seconds", span / (statistics.num_generated_tokens - 1)
        yield "dspark_longest_gap_seconds", ticket.longest_gap_s
