"""`dspark-trt generate`: prompts in, one JSON-ready object for each out, over the same loop that serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.deployment import Deployment
from dspark_trt.errors import DSparkError, RequestError
from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.request import GenerationRequest, SamplingParams

OnText = Callable[[int, str], None]  # index of the prompt, text that became certain


class GenerationFailedError(DSparkError):
    """The engine failed while it generated."""


@dataclass(slots=True)
class _Output:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[Any] = field(default_factory=list)


def generate(
    deployment: Deployment,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    scheduler: SchedulerConfig,
    on_text: OnText = lambda index, text: None,
) -> list[dict[str, Any]]:
    """Decode `prompts` (token ids) together, continuously batched; results in their order.

    Raises RequestError when a prompt or a parameter is not acceptable, GenerationFailedError when an engine fails.
    """
    loop = deployment.make_loop(scheduler)
    num_equal: Counter[tuple[int, ...]] = Counter()
    for index, prompt_ids in enumerate(map(tuple, prompts)):
        # equal prompts are told apart, as several sequences of one request would be; others draw as they do alone
        loop.submit(
            GenerationRequest(
                request_id=str(index),
                prompt_ids=prompt_ids,
                sampling=sampling,
                sequence_index=num_equal[prompt_ids],
            )
        )
        num_equal[prompt_ids] += 1
    outputs = [_Output() for _ in prompts]
    finished: dict[int, Emission] = {}
    while loop.has_work:
        for emission in loop.step():
            index = int(emission.request_id)
            output = outputs[index]
            output.text.append(emission.text)
            output.token_ids.extend(emission.token_ids)
            output.log_probs.extend(emission.log_probs or ())
            output.top_log_probs.extend(emission.top_log_probs or ())
            on_text(index, emission.text)
            if emission.finish_reason == "error":
                raise GenerationFailedError(f"prompt {index}: {emission.error}; run with --verbose to see the cause")
            if emission.finish_reason is not None:
                finished[index] = emission
    return [_describe(outputs[index], finished[index], sampling) for index in range(len(prompts))]


def _describe(output: _Output, last: Emission, sampling: SamplingParams) -> dict[str, Any]:
    statistics = last.statistics
    assert statistics is not None, "the last emission of a request has its statistics"
    verified, accepted = statistics.verified_per_position, statistics.accepted_per_position
    described: dict[str, Any] = {
        "text": "".join(output.text),
        "token_ids": output.token_ids,
        "finish_reason": last.finish_reason,
        "num_prompt_tokens": statistics.num_prompt_tokens,
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
    if sampling.num_log_probs is not None:
        described["log_probs"] = output.log_probs
        described["top_log_probs"] = output.top_log_probs
    return described


def scheduler_from_options(
    *, no_draft: bool, verify_len: int | None, mode: str | None, threshold: float | None
) -> SchedulerConfig:
    """Raises RecipeError when more than one way of choosing verify lengths is asked for."""
    chosen = {"--no-draft": no_draft, "--verify-len": verify_len is not None, "--scheduler": mode is not None}
    given = [option for option, is_given in chosen.items() if is_given]
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} exclude each other; give one of them")
    if no_draft:
        return SchedulerConfig(mode="off")
    if verify_len is not None:
        return SchedulerConfig(mode="fixed", verify_len=verify_len)
    return SchedulerConfig(mode=mode or "early_stop", threshold=threshold)  # type: ignore[arg-type] # checked there


def parse_logit_bias(entries: Sequence[str]) -> dict[int, float]:
    """`TOKEN_ID=BIAS` entries. Raises RequestError that names the entry."""
    biases = {}
    for entry in entries:
        token, _, bias = entry.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise RequestError(f"--logit-bias {entry!r}: expected TOKEN_ID=BIAS, e.g. 42=-100") from None
    return biases
