"""The fused step on a device against its parts: the oracle's draft, the scheduler's choice on the host, the oracle's verification."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt_plugins.prefix_select.reference import lagged_budget, survival

from dspark_trt import bindings
from dspark_trt.engines.protocol import (
    DraftBatch,
    EngineLimits,
    HostDrafts,
    IngestBatch,
    SelectBatch,
    SelectedOutput,
    TargetBatch,
)
from dspark_trt.engines.reference import open_reference_engines
from dspark_trt.errors import CapacityError, EngineBuildError
from dspark_trt.runtime.prefix_scheduler import admission_order, calibrated_confidence, survival_of
from tests.engine.conversations import read_pair
from tests.engine.onnxruntime_device_session import open_device_pair, spoil, valid_positions
from tests.factories import write_drafter, write_target

LIMITS = EngineLimits(max_slots=6, max_seq_len=96, max_batch_tokens=72)
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
        self.lengths = np.zeros(LIMITS.max_slots, np.int64)

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
        calibrated = calibrated_confidence(confidence, select.temperatures.astype(np.float64))
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


@pytest.mark.parametrize("case", [{}, {"head_type": "rnn", "gamma": 7}, {"confidence": False}, {"gamma": 1}], ids=str)
def test_a_fused_step_equals_draft_selection_and_verification(case: dict[str, Any], tmp_path: Path) -> None:
    steps = FusedSteps(tmp_path, seed=len(str(case)), **case)
    gamma, random = steps.gamma, steps.random
    for index in range(16):
        order = random.permutation(LIMITS.max_slots).tolist()
        count = int(random.integers(1, 5))
        rows, free = order[:count], order[count:]
        steps.begin(rows)
        num_drafting = int(random.integers(1, count + 1))
        caps = [int(random.integers(1, gamma + 1)) if at < num_drafting else 0 for at in range(count)]
        forced = tuple(at for at in range(num_drafting) if random.random() < 0.2)
        chunks = [(row, int(random.integers(1, 12))) for row in free[: index % 3]]
        steps.check(steps.inputs(rows, caps, int(random.integers(0, sum(caps) + 3)), forced=forced, chunks=chunks))
    assert steps.pair.target.bound_extents
    assert steps.pair.select.num_runs, "beside prompt chunks the selection is not bound"


@pytest.fixture
def steps(tmp_path: Path) -> FusedSteps:
    steps = FusedSteps(tmp_path)
    steps.begin([0, 1, 2, 3])
    return steps


def test_everything_that_is_offered_is_verified_where_the_budget_exceeds_it(steps: FusedSteps) -> None:
    assert steps.check(steps.inputs([0, 1, 2], [5, 2, 1], 1000)).tolist() == [5, 2, 1]


def test_nothing_is_verified_where_the_budget_is_0(steps: FusedSteps) -> None:
    assert steps.check(steps.inputs([0, 1, 2], [5, 2, 1], 0)).tolist() == [0, 0, 0]


def test_forced_drafts_are_not_counted_in_the_budget(steps: FusedSteps) -> None:
    chosen = steps.check(steps.inputs([2, 0, 1], [4, 3, 5], 2, forced=(0, 1)))
    assert chosen[:2].tolist() == [4, 3]
    assert chosen[2] == 2


def test_requests_that_do_not_draft_stand_behind_and_decode_their_anchor(steps: FusedSteps) -> None:
    chosen = steps.check(steps.inputs([3, 1, 0, 2], [5, 4, 0, 0], 6))
    assert chosen.sum() == 6
    assert chosen[2:].tolist() == [0, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_budget_is_spent_whatever_the_confidences_are(steps: FusedSteps, value: float) -> None:
    """T was fixed before: drafts of survival 0 fill it in their order."""

    def overwrite(tensors: Any) -> None:
        tensors[bindings.CONFIDENCE_LOGITS][0, 1:] = value
        tensors[bindings.CONFIDENCE_LOGITS][2] = value

    steps.pair.select.before_call = overwrite
    inputs = steps.inputs([0, 1, 2], [5, 5, 5], 11)
    _, found = steps.run(inputs)
    assert found.confidence_logits is not None
    assert not np.isfinite(found.confidence_logits[2]).any()
    assert found.verify_lens.sum() == 11
    np.testing.assert_array_equal(found.verify_lens, steps.choose(inputs.select, found.confidence_logits))


def test_a_step_beside_prompt_chunks_in_distant_rows(steps: FusedSteps) -> None:
    steps.check(steps.inputs([1, 2], [5, 5], 7, chunks=[(5, 20), (0, 19), (4, 3)]))
    assert steps.pair.target.num_runs >= 3


def test_the_host_hears_of_the_drafts_before_the_verification_has_run(steps: FusedSteps) -> None:
    """On a CPU device everything happens in order: the copies that `wait` reads stand in front of the verification."""
    heard: list[np.ndarray] = []
    fetched = steps.engines.drafter.fetched
    steps.pair.target.before_call = lambda tensors: heard.append(fetched._piece.array.copy())
    _, found = steps.run(steps.inputs([0, 1], [3, 3], 4))
    ids = fetched._layout.arrays(heard[-1])[bindings.DRAFT_IDS]
    np.testing.assert_array_equal(ids[:2], found.draft_ids)


def test_drafts_have_to_be_read_before_the_next_step(steps: FusedSteps) -> None:
    inputs = steps.inputs([0, 1], [3, 3], 4)
    late = steps.engines.step.draft_and_verify(inputs.draft, inputs.select, inputs.plain)
    steps.engines.step.draft_and_verify(inputs.draft, inputs.select, inputs.plain)
    with pytest.raises(AssertionError, match="fetched again"):
        late.wait()


def test_a_step_in_the_same_buckets_binds_nothing_again(steps: FusedSteps) -> None:
    sessions = (steps.pair.target, steps.pair.draft, steps.pair.select)
    steps.check(steps.inputs([0, 1, 2], [5, 5, 5], 5))
    bound = [len(session.bound_extents) for session in sessions]
    steps.check(steps.inputs([2, 0, 1], [5, 5, 5], 4))
    assert [len(session.bound_extents) for session in sessions] == bound
    steps.check(steps.inputs([2, 0], [5, 5], 6))
    assert [len(session.bound_extents) for session in sessions] == [bound[0], bound[1] + 1, bound[2] + 1]


def test_a_plain_step_and_a_fused_one_share_the_target_s_bucket(steps: FusedSteps) -> None:
    inputs = steps.inputs([0, 1, 2], [5, 5, 5], 5)
    steps.check(inputs)
    bound = len(steps.pair.target.bound_extents)
    drafts = np.zeros((3, 5), np.int64)
    plain = steps.with_drafts(inputs.plain, drafts, np.array([2, 0, 3]))
    steps.engines.target.forward(plain)
    assert len(steps.pair.target.bound_extents) == bound


def test_steps_beyond_the_limits_are_refused_before_anything_is_written(steps: FusedSteps) -> None:
    caches = [engine.cache._pool for engine in (steps.engines.target, steps.engines.drafter)]
    before = [cache.clone() for cache in caches]
    too_many = steps.inputs([0, 1], [5, 5], 10, chunks=[(4, 61)])
    steps.lengths[1] = LIMITS.max_seq_len - 4
    too_long = steps.inputs([0, 1], [5, 5], 1)
    for inputs, message in (
        (too_many, "73 packed tokens exceeds max_batch_tokens 72"),
        (too_long, "98 positions, max_seq_len is 96"),
    ):
        with pytest.raises(CapacityError, match=message):
            steps.engines.step.draft_and_verify(inputs.draft, inputs.select, inputs.plain)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old)


@pytest.mark.parametrize("graph", ["draft", "select", "target"])
def test_a_failing_backend_is_an_error_of_the_project(steps: FusedSteps, graph: str) -> None:
    inputs = steps.inputs([0, 1], [3, 3], 4)
    getattr(steps.pair, graph).is_failing = True
    with pytest.raises(EngineBuildError):
        steps.run(inputs)
    getattr(steps.pair, graph).is_failing = False
    steps.check(inputs)
