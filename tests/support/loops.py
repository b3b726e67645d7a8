"""Loops on toy engines with one small language, and what they must give."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.support.toy_engines import LIMITS, Output, ToyDrafter, ToyLanguage, ToyTarget, collect, make_loop, run

GAMMA = 7
LANGUAGE = ToyLanguage(vocab_size=16, order=3, num_patterns=499)
FIXED, OFF = SchedulerConfig("fixed"), SchedulerConfig("off")
ADAPTIVE = [SchedulerConfig("early_stop"), SchedulerConfig("lagged_budget")]
ALL_MODES = [
    OFF,
    SchedulerConfig("fixed"),
    SchedulerConfig("threshold", threshold=0.4),
    SchedulerConfig("early_stop"),
    SchedulerConfig("lagged_budget"),
    SchedulerConfig("auto"),
]
modes = pytest.mark.parametrize("config", ALL_MODES, ids=lambda config: config.mode)


def request(name: object, prompt: Any = (1, 2, 3), **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(name), prompt_ids=tuple(prompt), sampling=SamplingParams(**{"max_tokens": 24, **sampling})
    )


def loop_with(
    config: SchedulerConfig, *, skill: float = 0.8, gamma: int = GAMMA, limits: EngineLimits = LIMITS, **options: Any
) -> DecodingLoop:
    language = options.pop("language", LANGUAGE)
    drafter = ToyDrafter(language, limits, gamma=gamma, skill=skill)
    return make_loop(ToyTarget(language, limits), drafter, config, **options)


def decode_alone(each: GenerationRequest, config: SchedulerConfig, **options: Any) -> Output:
    return run(loop_with(config, **options), [each])[each.request_id]


class Parts:
    """A loop with its engines in reach."""

    def __init__(
        self, config: SchedulerConfig = FIXED, *, limits: EngineLimits = LIMITS, skill: float = 0.8, **options: Any
    ) -> None:
        self.target = ToyTarget(LANGUAGE, limits)
        self.drafter = ToyDrafter(LANGUAGE, limits, gamma=GAMMA, skill=skill)
        self.loop: DecodingLoop = make_loop(self.target, self.drafter, config, **options)
        self.outputs: dict[str, Output] = {}

    def submit(self, *requests: GenerationRequest) -> None:
        for each in requests:
            self.loop.submit(each)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            collect(self.loop, self.outputs)

    def finish(self) -> dict[str, Output]:
        while self.loop.has_work:
            self.step()
        return self.outputs


def plain(prompt: Any, max_tokens: int = 24) -> list[int]:
    """What greedy decoding gives: from the language, without any loop."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(LANGUAGE.logits(tokens).argmax()))
    return tokens[len(prompt) :]


def prompt_of(length: int, shift: int = 0) -> list[int]:
    return [(7 * at + 3 * shift) % 16 for at in range(length)]
