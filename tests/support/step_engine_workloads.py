"""Workloads of a loop with a StepEngine, and without, over the toy engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.steptable.table import StepTable
from tests.support.toy_engines import MODERATE, Output, ToyDrafter, ToyLanguage, ToyTarget, collect, make_loop
from tests.support.toy_step_engine import ToyStepEngine

GAMMA = 5
LANGUAGE = ToyLanguage(vocab_size=16, order=3, num_patterns=499)
LIMITS = EngineLimits(max_requests=5, max_seq_len=48, max_batch_tokens=28)
LAGGED = SchedulerConfig("lagged_budget", corrects=False)
STS = [0.8, 1.0, 1.3, 1.7, 0.6]


def request(name: object, prompt: Any = (1, 2, 3), **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(name), prompt_ids=tuple(prompt), sampling=SamplingParams(**{"max_tokens": 24, **sampling})
    )


def prompt_of(length: int, shift: int = 0) -> list[int]:
    return [(7 * at + 3 * shift) % 16 for at in range(length)]


def plain(prompt: Any, max_tokens: int = 24) -> list[int]:
    """What greedy decoding gives: from the language, without any loop."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(LANGUAGE.logits(tokens).argmax()))
    return tokens[len(prompt) :]


class Parts:
    """A loop with its engines in reach, and what every step did."""

    def __init__(
        self,
        *,
        fused: bool = True,
        config: SchedulerConfig = LAGGED,
        table: StepTable = MODERATE,
        limits: EngineLimits = LIMITS,
        engines: tuple[type[ToyTarget], type[ToyDrafter], type[ToyStepEngine]] = (ToyTarget, ToyDrafter, ToyStepEngine),
        **drafter: Any,
    ) -> None:
        self.target = engines[0](LANGUAGE, limits)
        self.drafter = engines[1](LANGUAGE, limits, **{"gamma": GAMMA, "skill": 0.7, **drafter})
        self.step_engine = engines[2](self.target, self.drafter)
        self.loop: DecodingLoop = make_loop(
            self.target,
            self.drafter,
            config,
            table=table,
            eos_token_ids=[9],
            calibration=Calibration.from_temperatures(STS),
            step_engine=self.step_engine if fused else None,
        )
        self.outputs: dict[str, Output] = {}
        self.counts: list[tuple[int, ...]] = []

    def submit(self, *requests: GenerationRequest) -> None:
        for each in requests:
            self.loop.submit(each)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            collect(self.loop, self.outputs)
            record = self.loop.last_step
            self.counts.append(
                (
                    record.num_requests,
                    record.num_prefill_tokens,
                    record.batch_tokens,
                    record.num_drafts_proposed,
                    record.num_drafts_verified,
                    record.num_drafts_accepted,
                    record.num_tokens_emitted,
                )
            )

    def finish(self) -> dict[str, Output]:
        while self.loop.has_work:
            self.step()
        return self.outputs


def play(parts: Parts, seed: int, num_arrivals: int = 40) -> None:
    """A random workload: arrivals in bursts, duplicates, long prompts in chunks, cancellations,
    every kind of request."""
    random = np.random.default_rng(seed)
    for name in range(num_arrivals):
        sampling: dict[str, Any] = {
            "max_tokens": int(random.integers(1, 25)),
            "temperature": float(random.choice([0.0, 0.7, 1.0, 1.6])),
            "seed": int(random.integers(0, 4)),
            "num_log_probs": None if random.random() < 0.7 else 2,
            "ignore_eos": bool(random.random() < 0.5),
        }
        if random.random() < 0.3:
            sampling |= {"top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 3}
        if random.random() < 0.2:
            sampling |= {"top_k": 4, "stop_strings": ("ab", "dd")}
        long_prompt = random.random() < 0.2
        prompt = random.integers(0, 16, random.integers(20, 49)).tolist() if long_prompt else [name % 3]
        each = GenerationRequest(
            request_id=str(name),
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(**sampling),
            max_verify_len=int(random.choice([0, 1, 3])) if random.random() < 0.3 else None,
        )
        parts.submit(each)
        parts.step(int(random.integers(0, 4)))
        if random.random() < 0.15:
            parts.loop.cancel(str(int(random.integers(0, name + 1))))
    parts.finish()


def trace_of(parts: Parts) -> list[Any]:
    """All that a client and the metrics see, apart from times."""
    requests = [
        (
            name,
            output.token_ids,
            output.text,
            output.log_probs,
            output.top_log_probs,
            output.last.finish_reason,
            [statistics.verify_lens, statistics.accepted_lens] if (statistics := output.last.statistics) else None,
        )
        for name, output in parts.outputs.items()
    ]
    return [requests, parts.counts, parts.loop.totals]
