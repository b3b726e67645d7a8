"""Steps of a device engine: random ones, and one that the step engine does in one go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark_trt.contract.protocol import DraftBatch, IngestBatch, SelectBatch, TargetBatch
from dspark_trt.engines.device.engines import DeviceEngines
from dspark_trt.engines.device.session import DeviceSession
from tests.support.device_cases import LIMITS, VOCABULARY, Pair

SLEEP_CYCLES = 500_000_000  # a quarter of a second and more


@dataclass
class Rows:
    """Random steps of an engine's rows, of which prefixes are committed."""

    gamma: int
    random: np.random.Generator

    def __post_init__(self) -> None:
        self.past = np.zeros(LIMITS.max_requests, np.int64)

    def batch(self, rows: np.ndarray, lengths: np.ndarray, num_decode: int) -> TargetBatch:
        num_tokens = int(lengths.sum())
        token_ids = self.random.integers(0, VOCABULARY, num_tokens)
        return TargetBatch(token_ids, rows, self.past[rows], lengths, num_decode, np.arange(num_tokens))

    def prompts(self) -> TargetBatch:
        """One for every row."""
        rows = np.arange(LIMITS.max_requests)
        return self.batch(rows, self.random.integers(1, 12, len(rows)), 0)

    def verification(self) -> TargetBatch:
        rows = self.random.permutation(self.random.integers(1, LIMITS.max_requests + 1))
        return self.batch(rows, self.random.integers(1, self.gamma + 2, len(rows)), len(rows))

    def commit(self, batch: TargetBatch) -> None:
        self.past[batch.rows] += self.random.integers(1, batch.query_lengths + 1)


class SleepyTarget:
    """A target whose verification takes long."""

    def __init__(self, session: DeviceSession) -> None:
        self._session = session

    def run(self, tensors: Any) -> None:
        self._session.run(tensors)

    def bind(self, tensors: Any) -> Callable[[], None]:
        call = self._session.bind(tensors)

        def sleep_and_call() -> None:
            torch.cuda._sleep(SLEEP_CYCLES)
            call()

        return sleep_and_call


@dataclass(frozen=True)
class FusedStep:
    """A step of three rows that `draft_and_verify` does."""

    draft: DraftBatch
    select: SelectBatch
    plain: TargetBatch


def prepare_step(engines: DeviceEngines, pair: Pair) -> FusedStep:
    """Rows 0 to 3 have a prompt; the first three draft, the fourth decodes alone."""
    rows = Rows(pair.gamma, np.random.default_rng(6))
    prompts = rows.prompts()
    taps = engines.target.forward(prompts).taps.clone()
    engines.drafter.ingest(IngestBatch(taps, prompts.rows, prompts.past_lengths, prompts.query_lengths))
    past, anchors = prompts.query_lengths, rows.random.integers(0, VOCABULARY, 4)
    uniforms = rows.random.random((3, pair.gamma), np.float32)
    draft = DraftBatch(np.arange(3), anchors[:3], past[:3], np.array([0.0, 0.8, 1.2], np.float32), uniforms)
    caps = np.array([pair.gamma, 2, pair.gamma, 0])
    select = SelectBatch(5, caps, np.array([False, True, False, False]), np.ones(pair.gamma, np.float32))
    plain = TargetBatch(anchors, np.arange(4), past, np.ones(4, np.int64), 4, np.arange(4))
    return FusedStep(draft, select, plain)
