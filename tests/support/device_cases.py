"""What the device runtime has to do on any device, on a small pair: the same checks on the CPU and on a GPU.

The oracle is the plain PyTorch engine on the CPU in float32, which shares no index arithmetic with the device runtime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.protocol import EngineLimits, PageLimits, TargetBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.engines.device.engines import DeviceEngines
from dspark_trt.reference.engines import ReferenceTargetEngine, open_reference_engines
from dspark_trt.reference.weights import ReferenceWeights
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.support.factories import write_drafter, write_target
from tests.support.toy_engines import MODERATE, run

LIMITS = EngineLimits(max_requests=4, max_seq_len=96, max_batch_tokens=48)
VOCABULARY = 11  # small, so that drafts of a random drafter are accepted now and then
SMALL_VOCABULARY = 5
FALSE_FAILURE = 1e-4
# with seeds whose random drafters have some 20 of 400 drafts accepted
HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {"seed": 6},
    "gated": {"head_type": "gated", "embed_head": "different", "seed": 1},
    "rnn": {"head_type": "rnn", "seed": 8},
    "no head, no confidence": {"markov_rank": 0, "confidence": False, "seed": 6},
}


@dataclass(frozen=True)
class Pair:
    target: TargetCheckpoint
    drafter: DrafterCheckpoint

    @property
    def gamma(self) -> int:
        return self.drafter.spec.gamma


def make_pair(folder: Path, *, target: dict[str, Any] | None = None, drafter: dict[str, Any] | None = None) -> Pair:
    target_folder = write_target(folder / "target", **({"family": "qwen3", "vocab_size": VOCABULARY} | (target or {})))
    drafter_folder = write_drafter(folder / "drafter", target_folder, **(drafter or HEADS["vanilla"]))
    checkpoint = read_target(str(target_folder))
    return Pair(checkpoint, read_drafter(str(drafter_folder), checkpoint))


def schedulers(gamma: int) -> dict[str, SchedulerConfig]:
    """No drafts, every verify length, and what chooses lengths."""
    fixed = {f"fixed {length}": SchedulerConfig("fixed", verify_len=length) for length in range(1, gamma + 1)}
    adaptive = {mode: SchedulerConfig(mode) for mode in ("early_stop", "lagged_budget")}  # type: ignore[arg-type]
    return {"off": SchedulerConfig("off"), **fixed, **adaptive}


def greedy_requests(num_requests: int = 7, max_tokens: int = 20) -> list[GenerationRequest]:
    """More than there are rows, with prompts of 1 to 42 tokens: they join, leave and move all the time."""
    random = np.random.default_rng(5)
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_ids=tuple(random.integers(0, VOCABULARY, 1 + 41 * index // (num_requests - 1)).tolist()),
            sampling=SamplingParams(max_tokens=max_tokens - index, temperature=0.0, ignore_eos=True),
        )
        for index in range(num_requests)
    ]


def decode(
    target: Any,
    drafter: Any,
    step: Any,
    scheduler: SchedulerConfig,
    acceptance: Any = None,
    pages: PageLimits | None = None,
    *,
    prefix_cache: bool = False,
) -> DecodingLoop:
    return DecodingLoop(
        target=target,
        drafter=drafter,
        step_engine=step,
        acceptance=acceptance,
        step_table=MODERATE,
        calibration=Calibration.from_temperatures([1.0] * drafter.gamma),
        eos_token_ids=[],
        decode=lambda ids: "".join(chr(65 + token % 26) for token in ids),
        scheduler=scheduler,
        pages=pages,
        prefix_cache=prefix_cache,
    )


def tokens_of(loop: DecodingLoop, requests: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    return {name: output.token_ids for name, output in run(loop, requests).items()}


def device_loop(
    engines: DeviceEngines, scheduler: SchedulerConfig, *, num_pages: int | None = None, prefix_cache: bool = False
) -> DecodingLoop:
    """`num_pages` of those that the engines have."""
    pages = engines.pages if num_pages is None else replace(engines.pages, num_pages=num_pages)
    parts = engines.target, engines.drafter, engines.step, scheduler, engines.acceptance, pages
    return decode(*parts, prefix_cache=prefix_cache)


def oracle_tokens(
    pair: Pair, requests: Sequence[GenerationRequest], limits: EngineLimits = LIMITS
) -> dict[str, list[int]]:
    """Without drafts."""
    target, drafter = open_reference_engines(pair.target, pair.drafter, limits=limits)
    return tokens_of(decode(target, drafter, None, SchedulerConfig("off")), requests)


def check_greedy(
    engines: DeviceEngines, pair: Pair, scheduler: SchedulerConfig, expected: dict[str, list[int]]
) -> None:
    """The oracle's tokens, whatever was drafted; and that drafts were accepted and rows moved on the way."""
    loop = device_loop(engines, scheduler)
    assert tokens_of(loop, greedy_requests()) == expected
    assert loop.totals.num_rows_moved > 0
    if scheduler.mode != "off":
        assert loop.totals.num_drafts_verified > loop.totals.num_drafts_accepted > 0


def exact_probs(
    pair: Pair, prompt: tuple[int, ...], num_tokens: int, temperature: float
) -> dict[tuple[int, ...], float]:
    """The probability of every continuation, float64, from the oracle's logits of every beginning."""
    of_target = ReferenceWeights(pair.target.weights, "cpu")
    target = ReferenceTargetEngine(pair.target.spec, of_target, taps=(), norm_last_tap=False, limits=LIMITS)
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for sequence, prob in probs.items():
            ids = np.array([*prompt, *sequence])
            batch = TargetBatch(ids, np.array([0]), np.array([0]), np.array([len(ids)]), 0, np.array([len(ids) - 1]))
            logits = target.forward(batch).logits[0].astype(np.float64) / temperature
            weights = np.exp(logits - logits.max())
            for token, weight in enumerate(weights / weights.sum()):
                longer[(*sequence, token)] = prob * weight
        probs = longer
    return probs


def check_distribution(engines: DeviceEngines, pair: Pair, scheduler: SchedulerConfig, *, num_samples: int) -> None:
    """Chi-square of whole outputs of three tokens against the exact distribution of the target, prefix by prefix.

    Seeds are fixed, so a result never changes on a device. Had the draws been random, this would fail falsely with
    probability FALSE_FAILURE.
    """
    prompt, num_tokens, temperature = (1, 2), 3, 1.0
    exact = exact_probs(pair, prompt, num_tokens, temperature)
    requests = [
        GenerationRequest(
            request_id=str(seed),
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=seed, ignore_eos=True),
        )
        for seed in range(num_samples)
    ]
    loop = device_loop(engines, scheduler)
    outputs = [tuple(tokens) for tokens in tokens_of(loop, requests).values()]
    if scheduler.mode != "off":
        totals = loop.totals
        assert totals.num_drafts_verified > totals.num_drafts_accepted > 0, "drafts are accepted and rejected"
    for length in range(1, num_tokens + 1):
        assert _pvalue(outputs, exact, length) > FALSE_FAILURE / num_tokens


def _pvalue(outputs: Sequence[tuple[int, ...]], exact: Mapping[tuple[int, ...], float], length: int) -> float:
    """Cells with an expectation below 5 are pooled."""
    found = Counter(output[:length] for output in outputs)
    probs: Counter[tuple[int, ...]] = Counter()
    for sequence, prob in exact.items():
        probs[sequence[:length]] += prob  # type: ignore[assignment]
    common = [cell for cell, prob in probs.items() if prob * len(outputs) >= 5]
    expected = [probs[cell] * len(outputs) for cell in common]
    counts = [found[cell] for cell in common]
    if len(common) < len(probs):
        expected.append(len(outputs) - sum(expected))
        counts.append(len(outputs) - sum(counts))
    statistic = sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))
    return chi_square_tail(statistic, len(counts) - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square >= statistic); without SciPy, which a GPU host need not have."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def check_same_up_to_ties(
    pair: Pair, found: dict[str, list[int]], expected: dict[str, list[int]], largest_gap: float
) -> None:
    """Greedy outputs in 16 bits: where they first differ, the two tokens' logits are closer than `largest_gap`.

    The gap is the float32 oracle's, behind what both have written; most requests have to agree to the end.
    """
    target, _ = open_reference_engines(pair.target, pair.drafter, limits=LIMITS)
    num_equal = 0
    for request in greedy_requests():
        one, other = found[request.request_id], expected[request.request_id]
        assert len(one) == len(other)
        at = next((index for index in range(len(one)) if one[index] != other[index]), None)
        if at is None:
            num_equal += 1
            continue
        ids = np.array([*request.prompt_ids, *one[:at]])
        batch = TargetBatch(ids, np.array([0]), np.array([0]), np.array([len(ids)]), 0, np.array([len(ids) - 1]))
        logits = target.forward(batch).logits[0]
        gap = abs(float(logits[one[at]] - logits[other[at]]))
        print(f"request {request.request_id}: tokens {one[at]} and {other[at]} at {at} are {gap:.4f} apart")
        assert gap < largest_gap, f"request {request.request_id} at {at}: {one[at]} and {other[at]} are {gap} apart"
    assert num_equal >= len(expected) // 2


def to_numpy(array: Any) -> np.ndarray:
    return torch.as_tensor(array).float().cpu().numpy()
