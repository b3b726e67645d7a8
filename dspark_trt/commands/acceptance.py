"""accepted_len and acceptance by position of data sets: what `dspark-trt eval` counts (paper Table 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.calibration.prompts import packaged_prompts, read_prompts
from dspark_trt.commands.generation import Prompt, Result, generate_each
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.deployment import Deployment
from dspark_trt.errors import DSparkError, RecipeError
from dspark_trt.text import TextCodec

EVERY_DRAFT = SchedulerConfig(mode="fixed")
SEED = 0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One data set. Position j is entry j - 1; None: never reached."""

    name: str
    num_prompts: int
    num_steps: int
    accepted_len: float  # mean over steps, bonus included
    conditional_acceptance: tuple[float | None, ...]  # given that all drafts before were accepted
    prefix_acceptance: tuple[float | None, ...]  # draft and all before it, of all that were verified


def read_sets(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Prompts by file, named after it; without files the packaged held-out ones by kind. Raises RecipeError."""
    if paths:
        return {path.stem: [prompt.prompt for prompt in read_prompts(path)] for path in paths}
    sets: dict[str, list[str]] = {}
    for prompt in packaged_prompts():
        if prompt.split == "held_out":
            sets.setdefault(prompt.kind, []).append(prompt.prompt)
    return sets


def evaluate_set(
    deployment: Deployment, name: str, texts: Sequence[str], *, max_tokens: int, temperature: float
) -> Acceptance:
    """Every draft of every block is verified. Prompts that do not fit are left out.

    Raises RecipeError when none fits.
    """
    sampling = deployment.sampling_params(max_tokens=max_tokens, temperature=temperature, seed=SEED)
    fitting = fitting_prompts(
        deployment.codec, name, texts, max_tokens=max_tokens, max_seq_len=deployment.target.limits.max_seq_len
    )
    prompts = [Prompt(ids, sampling) for _, ids in fitting]
    loop = deployment.make_loop(EVERY_DRAFT)
    found = generate_each(loop, prompts, num_ahead=deployment.target.limits.max_requests)
    return count_acceptance(name, (result for _, result in found), gamma=deployment.gamma)


def fitting_prompts(
    codec: TextCodec, name: str, texts: Sequence[str], *, max_tokens: int, max_seq_len: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Text and ids of the prompts that fit beside `max_tokens`. Raises RecipeError when none does."""
    encoded = [(text, tuple(codec.encode_prompt(text))) for text in texts]
    fitting = [(text, ids) for text, ids in encoded if 0 < len(ids) <= max_seq_len - max_tokens]
    if not fitting:
        raise RecipeError(f"{name}: no prompt fits beside {max_tokens} tokens; lower --max-tokens")
    return fitting


def count_acceptance(name: str, results: Iterable[Result | DSparkError], *, gamma: int) -> Acceptance:
    """Of one data set. The first error among the results is raised."""
    verified, accepted, accepted_lens, num_prompts = [0] * gamma, [0] * gamma, [], 0
    for result in results:
        if isinstance(result, DSparkError):
            raise result
        num_prompts += 1
        accepted_lens += result["accepted_lens"]
        for verify_len, num_tokens in zip(result["verify_lens"], result["accepted_lens"], strict=True):
            for position in range(verify_len):
                verified[position] += 1
                accepted[position] += position < num_tokens - 1
    reached = [verified[0], *accepted[:-1]]
    return Acceptance(
        name=name,
        num_prompts=num_prompts,
        num_steps=len(accepted_lens),
        accepted_len=sum(accepted_lens) / max(len(accepted_lens), 1),
        conditional_acceptance=_shares(accepted, [min(pair) for pair in zip(reached, verified, strict=True)]),
        prefix_acceptance=_shares(accepted, verified),
    )


def _shares(parts: Sequence[int], wholes: Sequence[int]) -> tuple[float | None, ...]:
    return tuple(part / whole if whole else None for part, whole in zip(parts, wholes, strict=True))
