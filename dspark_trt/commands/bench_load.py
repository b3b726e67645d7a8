"""One load of the core loop: so many requests in flight all the time, and what came of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from dspark_trt.errors import DSparkError
from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.metrics import RequestStatistics, StepRecord
from dspark_trt.runtime.request import GenerationRequest, SamplingParams

GOLDEN_RATIO = 0.6180339887  # its multiples, without the whole part, lie evenly and never repeat


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt as text, for servers, and as token ids, for the loop."""

    text: str
    ids: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Load:
    """The same for every mode: `concurrency` requests in flight until `num_requests` have ended."""

    kind: str  # of its prompts; "mixed": all kinds
    concurrency: int
    num_requests: int
    max_tokens: int
    prompts: tuple[BenchPrompt, ...]
    num_windows: int = 0  # parts of the run, by the tokens that were given, to be told apart

    def requests(self) -> Iterator[tuple[BenchPrompt, int]]:
        """Prompts and their numbers of tokens, without end: 3/4 to 5/4 of `max_tokens`.

        The numbers differ from request to request: where many end in one step, the prompts of the next are read
        together, which no traffic does, and which a mode that keeps requests in step would get for nothing.
        """
        for index, prompt in enumerate(cycle(self.prompts)):
            yield prompt, max(2, round(self.max_tokens * (0.75 + 0.5 * (index * GOLDEN_RATIO % 1.0))))


@dataclass(frozen=True, slots=True)
class Part:
    """A window of a run; parts of a load are of about the same tokens whatever the mode."""

    tokens_per_s: float
    mean_verify_len: float
    steps_drafting: float  # share of the steps in which requests decoded


@dataclass(frozen=True, slots=True)
class Measured:
    """One mode under one load, once. None: not told, or nothing to tell it from."""

    mode: str
    kind: str
    concurrency: int
    repeat: int
    tokens_per_s: float  # while `concurrency` requests were in flight
    user_tokens_per_s: float | None  # median over requests, behind the first token
    ttft_ms: float | None  # median over requests
    mean_verify_len: float | None
    accepted_len: float | None
    steps_not_drafting: float | None  # share
    requests_not_drafting: float | None  # share, over steps
    requests_looking_up: float | None  # share, over steps: with drafts copied from their own text
    price_errors: tuple[float, ...] = ()  # relative, of steps that read no prompt
    prefill_price_errors: tuple[float, ...] = ()
    parts: tuple[Part, ...] = ()  # [num_windows] of the load


@dataclass(slots=True)
class _Window:
    """What is counted: steps after the first requests were read, up to the last end."""

    records: list[StepRecord] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)  # of each step, since the window opened
    finished: list[RequestStatistics] = field(default_factory=list)
    started: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ends_s[-1] if self.ends_s else 0.0


def run_load(loop: DecodingLoop, mode: str, load: Load, repeat: int) -> Measured:
    """Raises DSparkError when a request fails."""
    window = _Window()
    wanted = enumerate(load.requests())
    for _ in range(load.concurrency):
        _submit(loop, next(wanted))
    unread = {str(index) for index in range(load.concurrency)}  # the window opens when the first prompts are read
    while len(window.finished) < load.num_requests:
        was_open = not unread
        emissions = loop.step()
        if was_open:
            window.records.append(loop.last_step)
            window.ends_s.append(time.perf_counter() - window.started)
        unread -= {emission.request_id for emission in emissions}
        if not was_open and not unread:
            window.started = time.perf_counter()
        for ended in _ended(emissions):
            if was_open:
                window.finished.append(ended)
            _submit(loop, next(wanted))
    _empty(loop)
    return _measured(window, mode, load, repeat)


def _submit(loop: DecodingLoop, wanted: tuple[int, tuple[BenchPrompt, int]]) -> None:
    index, (prompt, num_tokens) = wanted
    sampling = SamplingParams(max_tokens=num_tokens, seed=index, ignore_eos=True)
    loop.submit(
        GenerationRequest(request_id=str(index), prompt_ids=prompt.ids, sampling=sampling, sequence_index=index)
    )


def _ended(emissions: Sequence[Emission]) -> Iterator[RequestStatistics]:
    for emission in emissions:
        if emission.finish_reason == "error":
            raise DSparkError(f"request {emission.request_id}: {emission.error}; run with --verbose to see the cause")
        if emission.finish_reason is not None:
            assert emission.statistics is not None, "the last emission of a request has its statistics"
            yield emission.statistics


def _empty(loop: DecodingLoop) -> None:
    for request_id in loop.request_ids:
        loop.cancel(request_id)
    while loop.has_work:
        loop.step()


def _measured(window: _Window, mode: str, load: Load, repeat: int) -> Measured:
    records = window.records
    decoding = [record for record in records if record.num_requests]
    num_request_steps = sum(record.num_requests for record in decoding)
    speeds = [
        1e3 * (each.num_generated_tokens - 1) / (each.total_ms - each.first_token_ms)
        for each in window.finished
        if each.num_generated_tokens > 1
    ]
    return Measured(
        mode=mode,
        kind=load.kind,
        concurrency=load.concurrency,
        repeat=repeat,
        tokens_per_s=sum(record.num_tokens_emitted for record in records) / max(window.seconds, 1e-9),
        user_tokens_per_s=statistics.median(speeds) if speeds else None,
        ttft_ms=statistics.median(each.first_token_ms for each in window.finished),
        mean_verify_len=sum(record.num_drafts_verified for record in decoding) / max(num_request_steps, 1),
        accepted_len=1 + sum(record.num_drafts_accepted for record in decoding) / max(num_request_steps, 1),
        steps_not_drafting=sum(not record.num_drafting for record in decoding) / max(len(decoding), 1),
        requests_not_drafting=1 - sum(record.num_drafting for record in decoding) / max(num_request_steps, 1),
        requests_looking_up=sum(record.num_looking_up for record in decoding) / max(num_request_steps, 1),
        price_errors=_price_errors(record for record in records if not record.num_prefill_tokens),
        prefill_price_errors=_price_errors(record for record in records if record.num_prefill_tokens),
        parts=tuple(_parts(window, load.num_windows)),
    )


def _parts(window: _Window, num_parts: int) -> Iterator[Part]:
    total = sum(record.num_tokens_emitted for record in window.records)
    parts: list[list[tuple[StepRecord, float]]] = [[] for _ in range(num_parts)]
    given, before = 0, 0.0
    for record, end in zip(window.records, window.ends_s, strict=True):
        if num_parts:
            parts[min(given * num_parts // max(total, 1), num_parts - 1)].append((record, end - before))
        given, before = given + record.num_tokens_emitted, end
    for part in parts:
        decoding = [record for record, _ in part if record.num_requests]
        num_request_steps = sum(record.num_requests for record in decoding)
        yield Part(
            tokens_per_s=sum(record.num_tokens_emitted for record, _ in part) / max(sum(s for _, s in part), 1e-9),
            mean_verify_len=sum(record.num_drafts_verified for record in decoding) / max(num_request_steps, 1),
            steps_drafting=sum(record.num_drafting > 0 for record in decoding) / max(len(decoding), 1),
        )


def _price_errors(records: Iterator[StepRecord]) -> tuple[float, ...]:
    """|expected - measured| / measured of the steps that were priced."""
    return tuple(abs(record.expected_ms / record.total_ms - 1) for record in records if record.expected_ms > 0)
