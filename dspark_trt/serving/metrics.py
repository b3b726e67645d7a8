"""What the decoding loop counts, as Triton metrics: read once per step, whatever the number of requests.

The factory is `triton_python_backend_utils.MetricFamily`, handed in by the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.metrics import LoopTotals

_STEP_MS_BUCKETS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]
_FINISH_REASONS = ("stop", "length", "cancelled", "error")

# (family, description, labels, value of the totals): counters
_COUNTERS: tuple[tuple[str, str, dict[str, str], Callable[[LoopTotals], float]], ...] = (
    ("dspark_steps_total", "Steps of the decoding loop", {}, lambda totals: totals.num_steps),
    ("dspark_tokens_total", "Tokens handed out", {}, lambda totals: totals.num_tokens_emitted),
    ("dspark_prefill_tokens_total", "Prompt tokens read", {}, lambda totals: totals.num_prefill_tokens),
    ("dspark_drafts_total", "Draft tokens", {"state": "proposed"}, lambda totals: totals.num_drafts_proposed),
    ("dspark_drafts_total", "Draft tokens", {"state": "verified"}, lambda totals: totals.num_drafts_verified),
    ("dspark_drafts_total", "Draft tokens", {"state": "accepted"}, lambda totals: totals.num_drafts_accepted),
)


class ServingMetrics:
    """The metrics of one engine model."""

    def __init__(self, metric_family: Any, model_name: str) -> None:
        """`metric_family` has the interface of `triton_python_backend_utils.MetricFamily`."""
        self._families: dict[str, Any] = {}  # a metric lives as long as its family

        def metric(name: str, description: str, kind: Any, labels: dict[str, str], **options: Any) -> Any:
            if name not in self._families:
                self._families[name] = metric_family(name=name, description=description, kind=kind)
            return self._families[name].Metric(labels={"model": model_name, **labels}, **options)

        counter, gauge, histogram = metric_family.COUNTER, metric_family.GAUGE, metric_family.HISTOGRAM
        self._counters = [
            (metric(name, description, counter, labels), read) for name, description, labels, read in _COUNTERS
        ] + [
            (
                metric("dspark_finished_total", "Finished requests by reason", counter, {"reason": reason}),
                lambda totals, reason=reason: totals.num_finished[reason],
            )
            for reason in _FINISH_REASONS
        ]
        self._running = metric("dspark_requests", "Requests in the loop", gauge, {"state": "active"})
        self._queued = metric("dspark_requests", "Requests in the loop", gauge, {"state": "waiting"})
        self._step_ms = metric("dspark_step_ms", "Milliseconds of a step", histogram, {}, buckets=_STEP_MS_BUCKETS)
        self._loop: DecodingLoop | None = None
        self._known = [0.0] * len(self._counters)  # values of the loop's totals that were added

    def after_step(self, loop: DecodingLoop) -> None:
        """Add what the last step changed. A new loop starts its totals at 0."""
        if loop is not self._loop:
            self._loop, self._known = loop, [0.0] * len(self._counters)
        for index, (metric, read) in enumerate(self._counters):
            value = read(loop.totals)
            if value != self._known[index]:
                metric.increment(value - self._known[index])
                self._known[index] = value
        self._running.set(loop.num_running)
        self._queued.set(loop.num_queued)
        self._step_ms.observe(loop.last_step.total_ms)
