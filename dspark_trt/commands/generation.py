"""Prompts in, one JSON-ready object for each out, over the same loop that serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.deployment import Deployment
from dspark_trt.errors import DSparkError, RequestError
from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams

OnText = Callable[[int, str], None]  # index of the prompt, text that became certain
Result = dict[str, Any]


class GenerationFailedError(DSparkError):
    """The engine failed while it generated."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids, and how it is to be continued."""

    ids: tuple[int, ...]
    sampling: SamplingParams
    max_verify_len: int | None = None
    sequence_index: int | None = None  # tells apart equal prompts; None: those that are decoded together are counted


@dataclass(slots=True)
class _Output:
    sampling: SamplingParams
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[Any] = field(default_factory=list)

    def take(self, emission: Emission) -> None:
        self.text.append(emission.text)
        self.token_ids.extend(emission.token_ids)
        self.log_probs.extend(emission.log_probs or ())
        self.top_log_probs.extend(emission.top_log_probs or ())


def generate(
    deployment: Deployment,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    scheduler: SchedulerConfig,
    on_text: OnText = lambda index, text: None,
    *,
    max_verify_len: int | None = None,
    loop: DecodingLoop | None = None,
) -> list[Result]:
    """Decode `prompts` (token ids) together, continuously batched; results in their order.

    `loop`: one that is idle, in place of a new one; after an error it cannot be used again.

    Raises RequestError when a prompt or a parameter is not acceptable, GenerationFailedError when an engine fails.
    """
    results: list[Result] = [{} for _ in prompts]
    wanted = [Prompt(tuple(ids), sampling, max_verify_len) for ids in prompts]
    loop = loop or deployment.make_loop(scheduler, prefix_cache=deployment.recipe.prefix_cache)
    for index, result in generate_each(loop, wanted, on_text, num_ahead=len(prompts)):
        if isinstance(result, DSparkError):
            raise result
        results[index] = result
    return results


def generate_each(
    loop: DecodingLoop,
    prompts: Iterable[Prompt | RequestError],
    on_text: OnText = lambda index, text: None,
    *,
    num_ahead: int,
) -> Iterator[tuple[int, Result | DSparkError]]:
    """Index and result of each prompt as it ends: one that fails fails alone.

    Args:
        prompts: taken as places become free; an error in place of a prompt is handed on.
        num_ahead: prompts that the loop has at once.
    """
    waiting = enumerate(prompts)
    running: dict[int, _Output] = {}
    num_equal: Counter[tuple[int, ...]] = Counter()
    is_exhausted = False
    while running or not is_exhausted:
        while not is_exhausted and len(running) < num_ahead:
            index, prompt = next(waiting, (-1, None))
            if prompt is None:
                is_exhausted = True
            elif isinstance(prompt, RequestError):
                yield index, prompt
            elif refusal := _submit(loop, index, prompt, num_equal):
                yield index, refusal
            else:
                running[index] = _Output(prompt.sampling)
        for emission in loop.step() if running else ():
            index = int(emission.request_id)
            running[index].take(emission)
            on_text(index, emission.text)
            if emission.finish_reason is not None:
                yield index, _result(index, running.pop(index), emission)


def _submit(loop: DecodingLoop, index: int, prompt: Prompt, num_equal: Counter[tuple[int, ...]]) -> RequestError | None:
    """Equal prompts are told apart, as several sequences of one request would be; others draw as they do alone."""
    request = GenerationRequest(
        request_id=str(index),
        prompt_ids=prompt.ids,
        sampling=prompt.sampling,
        sequence_index=num_equal[prompt.ids] if prompt.sequence_index is None else prompt.sequence_index,
        max_verify_len=prompt.max_verify_len,
    )
    try:
        loop.submit(request)
    except RequestError as error:
        return error
    num_equal[prompt.ids] += 1
    return None


def _result(index: int, output: _Output, last: Emission) -> Result | GenerationFailedError:
    if last.finish_reason == "error":
        return GenerationFailedError(f"prompt {index}: {last.error}; run with --verbose to see the cause")
    statistics = last.statistics
    assert statistics is not None, "the last emission of a request has its statistics"
    verified, accepted = statistics.verified_per_position, statistics.accepted_per_position
    described: dict[str, Any] = {
        "text": "".join(output.text),
        "token_ids": output.token_ids,
        "finish_reason": last.finish_reason,
        "num_prompt_tokens": statistics.num_prompt_tokens,
        "num_prompt_tokens_reused": statistics.num_prompt_tokens_reused,
        "num_steps": statistics.num_steps,
        "num_drafts_proposed": statistics.num_drafts_proposed,
        "num_drafts_verified": statistics.num_drafts_verified,
        "num_drafts_accepted": statistics.num_drafts_accepted,
        "accepted_len": statistics.accepted_len,
        "mean_verify_len": statistics.mean_verify_len,
        "accepted_lens": statistics.accepted_lens,
        "verify_lens": statistics.verify_lens,
        "acceptance_per_position": [a / v if v else None for a, v in zip(accepted, verified, strict=True)],
        "timings_ms": {
            "queue": statistics.queue_ms,
            "first_token": statistics.first_token_ms,
            "total": statistics.total_ms,
            "draft": statistics.draft_ms,
            "verify": statistics.verify_ms,
        },
    }
    if output.sampling.num_log_probs is not None:
        described["log_probs"] = output.log_probs
        described["top_log_probs"] = output.top_log_probs
    return described
