"""Whether speculative output is the target's own, on the engines at hand. The checks behind `dspark-trt verify`.

Shape letters: `T` tokens of a text, `V` vocabulary, `N` sampled tokens.

Greedy: the same tokens with and without drafts. Where two logits of the target are closer than the noise of its float
arithmetic (measured: the same texts alone and in a batch), either token is right, and the gap is told.

Sampled: every text is read once more by the target, plainly, which gives the distribution that each token should have
been drawn from. With tokens ordered by falling probability, a number drawn uniformly between the cumulative
probabilities before and at the drawn token is uniform on [0, 1) exactly when the draw was fair, whatever came before.
A chi-square test over equal cells compares all of these numbers with that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.commands.generation import generate
from dspark_trt.contract.protocol import TargetBatch, TargetEngine
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.deployment import Deployment
from dspark_trt.log import Progress
from dspark_trt.runtime.arrays import to_host

FALSE_FAILURE = 1e-4  # of the whole command: shared by its chi-square tests
NUM_CELLS = 21  # an even number of degrees of freedom has a closed form
NOISE_MARGIN = 4.0  # a batch of another shape may be noisier than those that noise was measured on
FLOAT32_NOISE = 1e-5  # nats; noise is never taken to be less
SEED = 20_251

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GreedyDifference:
    """Where a greedy text first left that of plain decoding."""

    prompt: int
    token: int  # index in the answer
    gap: float  # nats between the two most probable tokens there, by plain decoding
    is_noise: bool


@dataclass(frozen=True, slots=True)
class ModeReport:
    """One mode, checked."""

    mode: str
    num_greedy_tokens: int  # compared
    differences: tuple[GreedyDifference, ...]
    num_drafts_verified: int
    num_drafts_accepted: int
    num_sampled_tokens: int
    chi_square: float
    p_value: float
    threshold: float  # fails below it

    @property
    def has_passed(self) -> bool:
        return self.p_value >= self.threshold and all(each.is_noise for each in self.differences)


@dataclass(frozen=True, slots=True)
class Exactness:
    """All modes of a build."""

    noise: float  # nats, measured between the same texts alone and in a batch
    false_failure: float  # probability that a right build fails
    modes: tuple[ModeReport, ...]

    @property
    def has_passed(self) -> bool:
        return all(mode.has_passed for mode in self.modes)


def check_exactness(
    deployment: Deployment,
    prompts: Sequence[Sequence[int]],
    modes: Sequence[str],
    *,
    num_tokens: int,
    num_samples: int,
    progress: Progress = lambda fraction: None,
) -> Exactness:
    """Every mode beside plain decoding; `num_samples` sampled texts of each prompt."""
    plain = _greedy(deployment, prompts, "off", num_tokens)
    progress(0.1)
    noise = measure_noise(plain, [_greedy(deployment, [prompt], "off", num_tokens)[0] for prompt in prompts])
    progress(0.2)
    reports = []
    for at, mode in enumerate(modes):
        greedy = _greedy(deployment, prompts, mode, num_tokens)
        differences = [
            difference
            for index, (one, other) in enumerate(zip(plain, greedy, strict=True))
            if (difference := compare_greedy(index, one, other, noise)) is not None
        ]
        numbers, sampled = _sampled(deployment, prompts, mode, num_tokens, num_samples)
        chi_square, p_value = uniformity(numbers)
        reports.append(
            ModeReport(
                mode=mode,
                num_greedy_tokens=sum(len(result["token_ids"]) for result in greedy),
                differences=tuple(differences),
                num_drafts_verified=sum(result["num_drafts_verified"] for result in [*greedy, *sampled]),
                num_drafts_accepted=sum(result["num_drafts_accepted"] for result in [*greedy, *sampled]),
                num_sampled_tokens=len(numbers),
                chi_square=chi_square,
                p_value=p_value,
                threshold=FALSE_FAILURE / len(modes),
            )
        )
        progress(0.2 + 0.8 * (at + 1) / len(modes))
    return Exactness(noise, FALSE_FAILURE, tuple(reports))


def _greedy(deployment: Deployment, prompts: Sequence[Sequence[int]], mode: str, num_tokens: int) -> list[Result]:
    sampling = deployment.sampling_params(
        max_tokens=num_tokens, temperature=0.0, seed=SEED, ignore_eos=True, num_log_probs=2, repetition_penalty=1.0
    )
    return generate(deployment, prompts, sampling, parse_scheduler(mode))


def measure_noise(batched: Sequence[Result], alone: Sequence[Result]) -> float:
    """The largest difference between log probabilities of equal tokens behind equal texts."""
    largest = FLOAT32_NOISE / NOISE_MARGIN
    for one, other in zip(batched, alone, strict=True):
        equal = _common(one["token_ids"], other["token_ids"])
        gaps = np.abs(np.subtract(one["log_probs"][:equal], other["log_probs"][:equal]))
        largest = max(largest, float(gaps.max(initial=0.0)))
    return largest


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    differing = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def compare_greedy(prompt: int, plain: Result, other: Result, noise: float) -> GreedyDifference | None:
    """None where both texts are equal."""
    at = _common(plain["token_ids"], other["token_ids"])
    if at == len(plain["token_ids"]) == len(other["token_ids"]):
        return None
    if at >= len(plain["token_ids"]) or at >= len(other["token_ids"]):
        return GreedyDifference(prompt, at, math.inf, is_noise=False)
    (_, first), (runner_up, second) = plain["top_log_probs"][at]
    gap = first - second
    is_noise = gap <= NOISE_MARGIN * noise and other["token_ids"][at] == runner_up
    return GreedyDifference(prompt, at, gap, is_noise)


def _sampled(
    deployment: Deployment, prompts: Sequence[Sequence[int]], mode: str, num_tokens: int, num_samples: int
) -> tuple[NDArray[np.float64], list[Result]]:
    """The numbers of all tokens behind the first, which comes without drafts, [N]; and the texts."""
    sampling = deployment.sampling_params(
        max_tokens=num_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=SEED,
        ignore_eos=True,
        repetition_penalty=1.0,
    )
    wanted = [prompt for prompt in prompts for _ in range(num_samples)]  # equal prompts are told apart by `generate`
    results = generate(deployment, wanted, sampling, parse_scheduler(mode))
    random = np.random.default_rng(SEED)
    numbers = []
    for prompt, result in zip(wanted, results, strict=True):
        token_ids = result["token_ids"]
        rows = teacher_forced_logits(deployment.target, [*prompt, *token_ids[:-1]])[len(prompt) :]
        numbers += [
            probability_transform(row, token, random.random()) for row, token in zip(rows, token_ids[1:], strict=True)
        ]
    return np.array(numbers), results


def teacher_forced_logits(target: TargetEngine, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """The target's logits behind every token of a text, read plainly, [T, V]. No loop may have work meanwhile."""
    limit, rows = target.limits.max_batch_tokens, []
    for past in range(0, len(token_ids), limit):
        chunk = np.array(token_ids[past : past + limit], dtype=np.int64)
        output = target.forward(
            TargetBatch(
                token_ids=chunk,
                rows=np.array([0], dtype=np.int64),
                past_lengths=np.array([past], dtype=np.int64),
                query_lengths=np.array([len(chunk)], dtype=np.int64),
                num_decode=0,
                logit_rows=np.arange(len(chunk), dtype=np.int64),
            )
        )
        rows.append(np.array(to_host(output.logits), dtype=np.float32))  # a copy: the next call reuses the buffer
    return np.concatenate(rows)


def probability_transform(logits: NDArray[np.float32], token_id: int, uniform: float) -> float:
    """Where the token lies among all by falling probability; uniform in [0, 1) for a fair draw. logits [V]."""
    wide = logits.astype(np.float64)
    probs = np.exp(wide - wide.max())
    probs /= probs.sum()
    own = probs[token_id]
    is_before = (probs > own) | ((probs == own) & (np.arange(len(probs)) < token_id))
    return float(min(probs[is_before].sum() + uniform * own, np.nextafter(1.0, 0.0)))


def uniformity(numbers: NDArray[np.float64]) -> tuple[float, float]:
    """Chi-square over NUM_CELLS equal cells of [0, 1), and its p-value."""
    counts, _ = np.histogram(numbers, bins=NUM_CELLS, range=(0.0, 1.0))
    expected = len(numbers) / NUM_CELLS
    statistic = float(((counts - expected) ** 2 / expected).sum()) if len(numbers) else 0.0
    half = statistic / 2
    # the survival function for an even number 2 m of degrees of freedom: exp(-x/2) sum_{k < m} (x/2)^k / k!
    terms = (math.exp(-half + k * math.log(half) - math.lgamma(k + 1)) for k in range(1, (NUM_CELLS - 1) // 2))
    p_value = math.exp(-half) + (sum(terms) if half > 0 else 0.0)
    return statistic, min(p_value, 1.0)
