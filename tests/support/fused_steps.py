"""Fused steps on the device engines over ONNX Runtime, and what their parts give:
draft, selection and verification one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dspark_trt_plugins.prefix_select.reference import lagged_budget, survival

from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.protocol import (
    DraftBatch,
    EngineLimits,
    HostDrafts,
    IngestBatch,
    SelectBatch,
    SelectedOutput,
    TargetBatch,
)
from dspark_trt.reference.engines import open_reference_engines
from dspark_trt.runtime.prefix_scheduler import admission_order, survival_of
from tests.support.conversations import read_pair
from tests.support.factories import write_drafter, write_target
from tests.support.onnxruntime_device_session import open_device_pair, spoil, valid_positions

LIMITS = EngineLimits(max_requests=6, max_seq_len=96, max_batch_tokens=72)
TAPS = (-1, 1, 3)
TOLERANCE = 1e-4
VOCABULARY = 97


@dataclass(frozen=True)
class Inputs:
    """Of one fused step."""

    draft: DraftBatch
    select: SelectBatch
    plain: TargetBatch


class FusedSteps:
    """Conversations of all rows on the device engines and the oracle; both caches of a row have the same length."""

    def __init__(self, folder: Path, seed: int = 0, **drafter: Any) -> None:
        target_folder = write_target(folder / "target", family="qwen3", tied=True)
        checkpoints = read_pair(target_folder, write_drafter(folder / "drafter", target_folder, taps=TAPS, **drafter))
        self.pair = open_device_pair(*checkpoints, folder / "graphs", limits=LIMITS)
        self.engines = self.pair.engines
        self.target, self.drafter = open_reference_engines(*checkpoints, limits=LIMITS)
        self.gamma: int = self.drafter.gamma
        self.random = np.random.default_rng(seed)
        self.lengths = np.zeros(LIMITS.max_requests, np.int64)

    def begin(self, rows: list[int]) -> None:
        """Prompts of random lengths, read and ingested."""
        lengths = self.random.integers(1, 20, len(rows))
        count = int(lengths.sum())
        none = np.zeros(len(rows), np.int64)
        prompt = TargetBatch(self.ids(count), np.array(rows), none, lengths, 0, np.empty(0, np.int64))
        for engine in (self.engines.target, self.target):
            engine.forward(prompt)
        self.lengths[rows] = lengths
        self.ingest(rows, lengths, none)

    def ingest(self, rows: list[int], query: np.ndarray, past: np.ndarray) -> None:
        taps = self.random.standard_normal((int(query.sum()), self.pair.drafter_dims.tap_width)).astype(np.float32)
        for engine in (self.engines.drafter, self.drafter):
            engine.ingest(IngestBatch(taps, np.array(rows), past, query))

    def ids(self, count: int) -> np.ndarray:
        return self.random.integers(0, VOCABULARY, count)

    def inputs(
        self, rows: list[int], caps: list[int], num_admitted: int, *, forced: tuple[int, ...] = (), chunks: Any = ()
    ) -> Inputs:
        """`caps` of each row, those that draft first; `chunks`: (row, tokens) of prompts that begin."""
        count, num_drafting = len(rows), sum(cap > 0 for cap in caps) or len(rows)
        self.lengths[[row for row, _ in chunks]] = 0
        anchors = self.ids(count)
        draft = DraftBatch(
            rows=np.array(rows[:num_drafting]),
            anchor_ids=anchors[:num_drafting],
            past_lengths=self.lengths[rows[:num_drafting]],
            temperatures=self.random.choice([0.0, 0.8], num_drafting).astype(np.float32),
            uniforms=self.random.random((num_drafting, self.gamma), dtype=np.float32),
        )
        select = SelectBatch(
            num_admitted,
            np.array(caps),
            np.isin(np.arange(count), forced),
            self.random.uniform(0.5, 2.0, self.gamma).astype(np.float32),
        )
        query = np.array([1] * count + [length for _, length in chunks])
        ends = query.cumsum() - 1
        plain = TargetBatch(
            token_ids=np.concatenate([anchors, *(self.ids(length) for _, length in chunks)]),
            rows=np.array(rows + [row for row, _ in chunks]),
            past_lengths=np.concatenate([self.lengths[rows], np.zeros(len(chunks), np.int64)]),
            query_lengths=query,
            num_decode=count,
            logit_rows=np.concatenate([np.arange(count), ends[count::2]]),  # of every other chunk
        )
        return Inputs(draft, select, plain)

    def run(self, inputs: Inputs) -> tuple[SelectedOutput, HostDrafts]:
        """With garbage in every buffer and behind every valid position, which stay as they are."""
        spoil(self.pair, self.lengths, self.lengths)
        before = valid_positions(self.pair, self.lengths)
        output = self.engines.step.draft_and_verify(inputs.draft, inputs.select, inputs.plain)
        for old, new in zip(before, valid_positions(self.pair, self.lengths), strict=True):
            assert torch.equal(old, new)
        return output, output.wait()

    def check(self, inputs: Inputs) -> np.ndarray:
        """Equal to its parts; returns verify_lens."""
        output, found = self.run(inputs)
        expected = self.drafter.draft(inputs.draft)
        np.testing.assert_array_equal(found.draft_ids, expected.draft_ids)
        np.testing.assert_allclose(output.draft_logits.numpy(), expected.draft_logits, atol=TOLERANCE, rtol=0)
        if expected.confidence_logits is None:
            assert found.confidence_logits is None
            confidence = np.full(found.draft_ids.shape, 1e30, np.float32)  # survival 1
        else:
            assert found.confidence_logits is not None
            np.testing.assert_allclose(found.confidence_logits, expected.confidence_logits, atol=TOLERANCE, rtol=0)
            confidence = found.confidence_logits
        chosen = self.choose(inputs.select, confidence)
        np.testing.assert_array_equal(found.verify_lens, chosen)
        verified = self.target.forward(self.with_drafts(inputs.plain, found.draft_ids, chosen))
        assert output.target.logits.shape == verified.logits.shape
        np.testing.assert_allclose(output.target.logits.numpy(), verified.logits, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(output.target.taps.numpy(), verified.taps, atol=TOLERANCE, rtol=0)
        return chosen

    def choose(self, select: SelectBatch, confidence: np.ndarray) -> np.ndarray:
        """As the scheduler of the runtime does, and as the plugin's reference does."""
        num_drafting, count = len(confidence), len(select.caps)
        free_caps = np.where(select.is_forced, 0, select.caps)[:num_drafting]
        calibration = Calibration.from_temperatures(select.temperatures.tolist())
        calibrated = calibration.confidence(confidence, np.ones(num_drafting, np.bool_))
        requests, _ = admission_order(survival_of(calibrated), free_caps)
        admitted = np.bincount(requests[: select.num_admitted], minlength=count)
        chosen = np.where(select.is_forced, select.caps, admitted)
        logits = np.zeros((count, self.gamma), np.float32)
        logits[:num_drafting] = confidence
        of_plugin = lagged_budget(
            survival(logits, select.temperatures),
            caps=select.caps,
            is_forced=select.is_forced,
            num_admitted=select.num_admitted,
        )
        np.testing.assert_array_equal(chosen, of_plugin)
        return chosen

    @staticmethod
    def with_drafts(plain: TargetBatch, draft_ids: np.ndarray, verify_lens: np.ndarray) -> TargetBatch:
        n = plain.num_decode
        ids: list[int] = []
        for at, verify_len in enumerate(verify_lens):
            ids += [plain.token_ids[at], *(draft_ids[at, :verify_len] if verify_len else [])]
        query = plain.query_lengths.copy()
        query[:n] += verify_lens
        of_chunks = plain.logit_rows[plain.logit_rows >= n] - n + len(ids)
        return replace(
            plain,
            token_ids=np.concatenate([np.array(ids), plain.token_ids[n:]]),
            query_lengths=query,
            logit_rows=np.concatenate([np.arange(len(ids)), of_chunks]),
        )
