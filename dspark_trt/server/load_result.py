"""From the answers of a served load to the numbers that matter for speculative decoding.

A response of a speculative step carries several tokens, so everything here counts tokens (`num_output_tokens`), not
responses as perf_analyzer does. Draft statistics come with the last response of each request.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load: `num_requests` requests, `concurrency` of them at any time."""

    scheduler: str
    concurrency: int
    num_requests: int
    num_tokens: int
    tokens_per_s: float  # first request sent to last response, ramp-down included
    ttft_ms: float  # median over requests: sent to first token
    ttft_p95_ms: float
    inter_token_ms: float  # median over requests: first to last response, per token behind the first response
    accepted_len: float  # tokens per verification step
    mean_verify_len: float  # drafts verified per step


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """When a request was sent and what came back."""

    sent_ms: float
    response_ms: list[float]
    num_tokens: list[int]  # of each response
    num_steps: int
    num_drafts_verified: int

    @classmethod
    def of(cls, sent_ms: float, response_ms: list[float], outputs: Sequence[dict[str, Any]]) -> ServedRequest:
        """outputs: of each response, by name. Raises ValueError when the request did not end as it should."""
        last = outputs[-1]
        if last.get("finish_reason") not in ("stop", "length"):
            raise ValueError(f"a request of the load test did not end with stop or length but with {last}")
        return cls(
            sent_ms=sent_ms,
            response_ms=response_ms,
            num_tokens=[int(output["num_output_tokens"]) for output in outputs],
            num_steps=int(last["num_steps"]),
            num_drafts_verified=int(last["total_draft_tokens"]),
        )

    @property
    def ttft_ms(self) -> float:
        return self.response_ms[0] - self.sent_ms

    @property
    def inter_token_ms(self) -> float | None:
        """None for an answer that came in one response."""
        num_behind_first = sum(self.num_tokens[1:])
        return (self.response_ms[-1] - self.response_ms[0]) / num_behind_first if num_behind_first else None


def load_result(requests: Sequence[ServedRequest], *, scheduler: str, concurrency: int, num_warmup: int) -> LoadResult:
    """Evaluate a load without the first `num_warmup` requests that were sent."""
    measured = sorted(requests, key=lambda request: request.sent_ms)[num_warmup:]
    num_tokens = sum(sum(request.num_tokens) for request in measured)
    num_steps = sum(request.num_steps for request in measured)
    span_ms = max(request.response_ms[-1] for request in measured) - measured[0].sent_ms
    ttfts = [request.ttft_ms for request in measured]
    intervals = [request.inter_token_ms for request in measured if request.inter_token_ms is not None]
    return LoadResult(
        scheduler=scheduler,
        concurrency=concurrency,
        num_requests=len(measured),
        num_tokens=num_tokens,
        tokens_per_s=1e3 * num_tokens / span_ms,
        ttft_ms=statistics.median(ttfts),
        ttft_p95_ms=sorted(ttfts)[int(0.95 * (len(ttfts) - 1))],
        inter_token_ms=statistics.median(intervals) if intervals else 0.0,
        # the first token comes from the prompt's own logits, without a verification step
        accepted_len=(num_tokens - len(measured)) / max(num_steps, 1),
        mean_verify_len=sum(request.num_drafts_verified for request in measured) / max(num_steps, 1),
    )


def read_export(export: Path, *, scheduler: str, num_warmup: int) -> LoadResult:
    """Evaluate the one experiment of perf_analyzer's profile export.

    Raises ValueError when a request did not end as it should.
    """
    (experiment,) = json.loads(export.read_text())["experiments"]
    requests = [
        ServedRequest.of(
            entry["timestamp"] / 1e6,
            [timestamp / 1e6 for timestamp in entry["response_timestamps"]],
            entry["response_outputs"],
        )
        for entry in experiment["requests"]
    ]
    concurrency = experiment["experiment"]["value"]
    return load_result(requests, scheduler=scheduler, concurrency=concurrency, num_warmup=num_warmup)
