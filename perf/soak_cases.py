"""What a soak asks, with the answers: decoded in this process, by the same build, greedy and without drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.calibration.prompts import packaged_prompts
from dspark_trt.commands.generation import Prompt, Result, generate_each
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.deployment import Deployment, load_deployment
from dspark_trt.errors import DSparkError

TIED_LOG_PROB_GAP = 1e-3  # below it the steps of two batches may choose differently; an answer ends before it
_OUTPUT_TOKENS = (1, 8, 24, 64, 160)
_LONG_EVERY = 6  # one prompt of so many is long
_LONG_SHARE = 8  # a long prompt and its answer fill a row to one part of so many, at most


@dataclass(frozen=True, slots=True)
class Case:
    """One request and what every server of the build must answer to it."""

    prompt: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def make_cases(build_dir: Path, num_cases: int = 40) -> list[Case]:
    """Short and long prompts, short and long answers, always the same ones for a build."""
    deployment = load_deployment(build_dir)
    wanted = list(_requests(deployment, num_cases))
    answers = _answers(deployment, [(ids, max_tokens) for _, ids, max_tokens in wanted])
    # An answer with a tie in it is asked for up to the tie only, and decoded again: its text may end differently there.
    certain = [_num_certain(answer) for answer in answers]
    cut = [at for at, answer in enumerate(answers) if 0 < certain[at] < len(answer["token_ids"])]
    for at, answer in zip(cut, _answers(deployment, [(wanted[at][1], certain[at]) for at in cut]), strict=True):
        answers[at] = answer
    return [
        Case(text, ids, len(answer["token_ids"]), tuple(answer["token_ids"]), answer["text"], answer["finish_reason"])
        for (text, ids, _), answer, count in zip(wanted, answers, certain, strict=True)
        if count
    ]


def _requests(deployment: Deployment, count: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    chosen = random.Random(count)
    texts = [prompt.prompt for prompt in packaged_prompts()]
    for number in range(count):
        max_tokens = _OUTPUT_TOKENS[number % len(_OUTPUT_TOKENS)]
        parts = [chosen.choice(texts)]
        if number % _LONG_EVERY == 0:
            limit = deployment.target.limits.max_seq_len // _LONG_SHARE - max_tokens
            while len(deployment.codec.encode(" ".join(parts))) < limit:
                parts.append(chosen.choice(texts))
            parts = parts[:-1] or parts
        prompt = " ".join(parts)
        yield prompt, tuple(deployment.codec.encode(prompt)), max_tokens


def _answers(deployment: Deployment, wanted: list[tuple[tuple[int, ...], int]]) -> list[Result]:
    prompts = [
        Prompt(ids, deployment.sampling_params(temperature=0.0, max_tokens=max_tokens, num_log_probs=2))
        for ids, max_tokens in wanted
    ]
    results: list[Result] = [{} for _ in prompts]
    loop = deployment.make_loop(SchedulerConfig("off"))
    for index, result in generate_each(loop, prompts, num_ahead=max(len(prompts), 1)):
        if isinstance(result, DSparkError):
            raise result
        results[index] = result
    return results


def _num_certain(answer: Result) -> int:
    """Tokens before the first one whose runner-up is as likely."""
    gaps = (first[1] - second[1] for first, second in answer["top_log_probs"])
    tie = next((at for at, gap in enumerate(gaps) if gap < TIED_LOG_PROB_GAP), None)
    return len(answer["token_ids"]) if tie is None else tie
