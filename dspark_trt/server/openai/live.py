"""What the server does at this moment, from two readings of its metrics: the numbers behind the live page."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections import deque
from dataclasses import dataclass
from typing import Any

from dspark_trt.server.openai.errors import ApiError

WINDOW_S = 10.0  # over which rates and means are taken
_MIN_AGE_S = 0.5  # of a reading before Triton is asked again
_TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"(dspark_\w+)(?:\{([^}]*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our own server is behind no proxy

Samples = dict[str, float]  # a family's name, with the state, outcome or kind that it counts


@dataclass(frozen=True, slots=True)
class Reading:
    """Triton's metrics at one time."""

    taken_at: float
    text: str
    samples: Samples


class Metrics:
    """Triton's metrics endpoint, read at most twice a second however many ask."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._readings: deque[Reading] = deque()
        self._lock = asyncio.Lock()

    async def text(self) -> str:
        """As Triton writes them. Raises ApiError when they cannot be read."""
        return (await self._read()).text

    async def live(self) -> dict[str, Any]:
        """See `describe`. Raises ApiError."""
        newest = await self._read()
        return describe(self._readings[0], newest)

    async def _read(self) -> Reading:
        async with self._lock:
            if not self._readings or time.monotonic() - self._readings[-1].taken_at >= _MIN_AGE_S:
                try:
                    text = await asyncio.to_thread(_fetch, self._url)
                except OSError:
                    raise ApiError(
                        503, "the metrics cannot be read at the moment", kind="server_error", code="unavailable"
                    ) from None
                self._readings.append(Reading(time.monotonic(), text, parse(text)))
                while self._readings[-1].taken_at - self._readings[0].taken_at > WINDOW_S:
                    self._readings.popleft()
            return self._readings[-1]


def _fetch(url: str) -> str:
    with _DIRECT.open(url, timeout=_TIMEOUT_S) as answer:
        return str(answer.read().decode())


def parse(text: str) -> Samples:
    """Our own samples, without the buckets of histograms."""
    samples: Samples = {}
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) and not found[1].endswith("_bucket"):
            labels = [value for name, value in _LABEL.findall(found[2] or "") if name != "model"]
            samples["/".join([found[1], *sorted(labels)])] = float(found[3])
    return samples


def describe(first: Reading, last: Reading) -> dict[str, Any]:
    """Load now, and rates and means between two readings; None where nothing happened between them.

    `skipping` is the share of steps with decoding requests that drafted nothing.
    """
    seconds = last.taken_at - first.taken_at

    def grown(name: str) -> float:
        return max(last.samples.get(name, 0.0) - first.samples.get(name, 0.0), 0.0)

    def mean(family: str) -> float | None:
        return _ratio(grown(f"{family}_sum"), grown(f"{family}_count"))

    tokens, accepted = grown("dspark_tokens_total"), grown("dspark_drafts_total/accepted")
    return {
        "window_s": round(seconds, 1),
        "running": last.samples.get("dspark_requests_running"),
        "waiting": last.samples.get("dspark_requests_waiting"),
        "rows": last.samples.get("dspark_max_requests"),
        "kv_used": last.samples.get("dspark_kv_used_ratio"),
        "tokens_per_s": tokens / seconds if seconds else None,
        "steps_per_s": grown("dspark_steps_total") / seconds if seconds else None,
        "ttft_s": mean("dspark_time_to_first_token_seconds"),
        "accepted_len": _ratio(tokens, tokens - accepted),  # tokens of a request in a step that gave it some
        "verify_len": mean("dspark_verify_len"),
        "skipping": _ratio(grown("dspark_steps_without_drafts_total"), grown("dspark_verify_len_count")),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
