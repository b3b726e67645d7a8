"""Any OpenAI-compatible server under the same loads: one more column of the interleaved run."""

from __future__ import annotations

import json
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dspark_trt.commands.bench_load import BenchPrompt, Load, Measured
from dspark_trt.errors import EnvironmentMissingError

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class _Answer:
    num_tokens: int
    first_token_ms: float
    total_ms: float
    num_drafts: int | None  # verified, where the server tells
    num_accepted: int | None


class Server:
    """One base URL, with or without /v1 behind it."""

    def __init__(self, url: str) -> None:
        """Raises EnvironmentMissingError when nothing answers there."""
        self.name = url.rstrip("/")
        self._base = self.name if self.name.endswith("/v1") else f"{self.name}/v1"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._model = self._first_model()

    def _first_model(self) -> str:
        try:
            with self._open(f"{self._base}/models", timeout=TIMEOUT_S) as response:
                return str(json.load(response)["data"][0]["id"])
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise EnvironmentMissingError(
                f"--against {self.name}: expected an OpenAI-compatible server that lists its models, found "
                f"{type(error).__name__}: {error}; start it, or correct the address"
            ) from None

    def run(self, load: Load, repeat: int) -> Measured:
        """`load.concurrency` connections; first request sent to last answer. Raises EnvironmentMissingError."""
        count = max(load.num_requests, load.concurrency)
        start = time.perf_counter()
        with ThreadPoolExecutor(load.concurrency) as pool:
            answers = list(pool.map(lambda wanted: self._answer(*wanted), islice(load.requests(), count)))
        seconds = time.perf_counter() - start
        speeds = [
            1e3 * (each.num_tokens - 1) / (each.total_ms - each.first_token_ms)
            for each in answers
            if each.num_tokens > 1 and each.total_ms > each.first_token_ms
        ]
        mean_verify_len, accepted_len = _acceptance(answers)
        return Measured(
            mode=self.name,
            kind=load.kind,
            concurrency=load.concurrency,
            repeat=repeat,
            tokens_per_s=sum(each.num_tokens for each in answers) / seconds,
            user_tokens_per_s=statistics.median(speeds) if speeds else None,
            ttft_ms=statistics.median(each.first_token_ms for each in answers),
            steps_not_drafting=None,
            requests_not_drafting=None,
            requests_looking_up=None,
            mean_verify_len=mean_verify_len,
            accepted_len=accepted_len,
        )

    def _answer(self, prompt: BenchPrompt, max_tokens: int) -> _Answer:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"{self._base}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        start = time.perf_counter()
        first: float | None = None
        usage: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        try:
            with self._open(request, timeout=TIMEOUT_S) as response:
                for event in _events(response):
                    usage = event.get("usage") or usage
                    timings = event.get("timings") or timings
                    if first is None and any(_text(choice) for choice in event.get("choices", ())):
                        first = (time.perf_counter() - start) * 1e3
        except urllib.error.HTTPError as error:
            raise EnvironmentMissingError(f"--against {self.name}: {error} {error.read(500).decode()}") from None
        except (OSError, ValueError) as error:
            raise EnvironmentMissingError(f"--against {self.name}: the answer broke off ({error})") from None
        total = (time.perf_counter() - start) * 1e3
        if not usage or "completion_tokens" not in usage:
            raise EnvironmentMissingError(
                f"--against {self.name}: expected usage.completion_tokens in the stream, found none; this server "
                "cannot be measured, since chunks are no tokens"
            )
        return _Answer(
            int(usage["completion_tokens"]), total if first is None else first, total, *_drafts(usage, timings)
        )


def _events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        text = line.decode().strip()
        if text.startswith("data:") and (data := text.removeprefix("data:").strip()) != "[DONE]":
            yield json.loads(data)


def _text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(delta.get("content") or delta.get("reasoning_content"))


def _drafts(usage: dict[str, Any], timings: dict[str, Any]) -> tuple[int | None, int | None]:
    """Drafts verified and accepted: `timings` of llama.cpp, or the prediction fields of OpenAI's usage."""
    if "draft_n" in timings:
        return int(timings["draft_n"]), int(timings.get("draft_n_accepted", 0))
    details = usage.get("completion_tokens_details") or {}
    accepted, rejected = details.get("accepted_prediction_tokens"), details.get("rejected_prediction_tokens")
    if accepted is None or rejected is None:
        return None, None
    return int(accepted) + int(rejected), int(accepted)


def _acceptance(answers: list[_Answer]) -> tuple[float | None, float | None]:
    """mean_verify_len and accepted_len per step: tokens behind the first are a step's bonus or an accepted draft."""
    told = [each for each in answers if each.num_drafts is not None and each.num_accepted is not None]
    steps = sum(each.num_tokens - 1 - (each.num_accepted or 0) for each in told)
    if steps <= 0:
        return None, None
    return (
        sum(each.num_drafts or 0 for each in told) / steps,
        1 + sum(each.num_accepted or 0 for each in told) / steps,
    )
