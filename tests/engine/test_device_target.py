"""The device target engine, over ONNX Runtime on the tensors' memory,
against the PyTorch oracle and the ONNX Runtime engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.contract import bindings
from dspark_trt.contract.cache_dims import CacheDims
from dspark_trt.contract.dims import TargetDims, target_dims_from_metadata
from dspark_trt.contract.protocol import EngineLimits, PageLimits, TargetBatch
from dspark_trt.engines.device.pages import DevicePages
from dspark_trt.engines.device.target import DeviceTargetEngine
from dspark_trt.errors import CapacityError, EngineBuildError
from dspark_trt.graphs.target import write_target_graph
from dspark_trt.reference.engines import ReferenceTargetEngine, open_reference_engines
from tests.support.conversations import Conversations, Step, open_pair, read_pair
from tests.support.factories import write_drafter, write_target
from tests.support.onnxruntime_device_session import (
    DevicePair,
    OnnxRuntimeDeviceSession,
    open_device_pair,
    spoil,
    spoil_row,
    valid_positions,
)

LIMITS = EngineLimits(max_requests=6, max_seq_len=96, max_batch_tokens=64)
TAPS = (-1, 1, 3)
TOLERANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "qwen3 tied": {"family": "qwen3", "tied": True},
    "llama biases": {"biases": True},
    "llama one KV head": {"kv_heads": 1},
    "llama head_dim 12": {"head_dim": 12},
}


def make_pair(folder: Path, **target: Any) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    target_folder = write_target(folder / "target", **target)
    return read_pair(target_folder, write_drafter(folder / "drafter", target_folder, taps=TAPS))


class Rows:
    """The same conversations on the device engine and the oracle."""

    def __init__(self, pair: DevicePair, reference: ReferenceTargetEngine, seed: int = 0) -> None:
        self.pair = pair
        self.engine = pair.engines.target
        self.reference = reference
        self.conversations = Conversations(num_rows=LIMITS.max_requests, vocab_size=97, seed=seed)
        pair.tables[:] = self.conversations.random.permutation(pair.tables.ravel()).reshape(pair.tables.shape)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.conversations.tokens])

    def check(self, step: Step) -> None:
        """Equal to the oracle with garbage all around, and valid positions of all rows stay as they are."""
        lengths = self.lengths
        spoil(self.pair, lengths)
        before = valid_positions(self.pair, lengths)
        output = self.engine.forward(self.with_tables(step))
        expected = self.reference.forward(step.batch)
        assert output.logits.shape == expected.logits.shape
        np.testing.assert_allclose(output.logits.numpy(), expected.logits, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(output.taps.numpy(), expected.taps, atol=TOLERANCE, rtol=0)
        for row, (old, new) in enumerate(zip(before, valid_positions(self.pair, lengths), strict=True)):
            assert torch.equal(old, new), f"valid positions of row {row} were written"

    def with_tables(self, step: Step) -> TargetBatch:
        return replace(step.batch, block_tables=self.pair.tables[step.batch.rows])

    def take(self, rows: list[int], query: list[int], num_decode: int, accepted: list[int] | None = None) -> None:
        step = self.conversations.step(rows, query, num_decode)
        self.check(step)
        self.conversations.commit(step, query if accepted is None else accepted)

    def move(self, source: int, destination: int) -> None:
        tokens = self.conversations.tokens
        """Pages stay where they are."""
        self.pair.tables[[source, destination]] = self.pair.tables[[destination, source]]
        for engine in (self.engine, self.reference):
            engine.move_row(source, destination, len(tokens[source]))
        tokens[destination], tokens[source] = tokens[source], []

    def random_step(self) -> None:
        random, tokens = self.conversations.random, self.conversations.tokens
        rows = random.permutation(LIMITS.max_requests)[: random.integers(1, LIMITS.max_requests + 1)].tolist()
        rows = [row for row in rows if len(tokens[row]) < LIMITS.max_seq_len - 14] or rows[:1]
        for row in rows:
            if len(tokens[row]) >= LIMITS.max_seq_len - 14 or random.random() < 0.1:
                tokens[row] = []  # another request takes the row
        gamma = self.engine.gamma
        num_decode = int(random.integers(0, len(rows) + 1))
        longest = 1 if random.random() < 0.3 else gamma + 1
        query = [int(random.integers(1, 1 + (longest if at < num_decode else 14))) for at in range(len(rows))]
        while sum(query) > LIMITS.max_batch_tokens:
            query[int(np.argmax(query))] -= 1
        self.take(rows, query, num_decode, [int(random.integers(1, length + 1)) for length in query])


def open_rows(folder: Path, seed: int = 0, **target: Any) -> Rows:
    checkpoints = make_pair(folder, **target)
    pair = open_device_pair(*checkpoints, folder / "graphs", limits=LIMITS)
    return Rows(pair, open_reference_engines(*checkpoints, limits=LIMITS)[0], seed)


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return open_rows(tmp_path, family="qwen3", tied=True)


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_the_oracle_over_random_steps_with_rejections_moves_and_reuse(case: str, tmp_path: Path) -> None:
    rows = open_rows(tmp_path, seed=sum(case.encode()), **CASES[case])
    for index in range(25):
        rows.random_step()
        empty = [row for row, tokens in enumerate(rows.conversations.tokens) if not tokens]
        filled = [row for row, tokens in enumerate(rows.conversations.tokens) if tokens]
        if index % 5 == 4 and empty and filled:
            rows.move(filled[-1], empty[0])
    assert rows.pair.target.num_runs
    assert rows.pair.target.bound_extents


def test_outputs_equal_those_of_the_onnxruntime_engine_of_the_same_target(tmp_path: Path) -> None:
    checkpoints = make_pair(tmp_path, family="qwen3")
    pair = open_device_pair(*checkpoints, tmp_path / "graphs", limits=LIMITS)
    other, _ = open_pair(*checkpoints, tmp_path / "rows", limits=LIMITS)
    conversations = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    for _ in range(6):
        step = conversations.random_step(max_query=pair.engines.target.gamma + 1)
        output, expected = pair.engines.target.forward(step.batch), other.forward(step.batch)
        np.testing.assert_allclose(output.logits.numpy(), expected.logits, atol=2e-5, rtol=0)
        np.testing.assert_allclose(output.taps.numpy(), expected.taps, atol=5e-5, rtol=0)
        conversations.commit(step, conversations.random_acceptance(step))


def test_steps_that_decode_take_few_buckets_wherever_their_rows_are(rows: Rows) -> None:
    rows.take([0, 1, 2, 3, 4], [3] * 5, 0)
    for active in ([1], [2], [0, 1, 2], [2, 0], [4, 3, 2, 1, 0]):
        rows.take(active, [1] * len(active), len(active))
    verifying = len(rows.pair.target.bound_extents)
    for query in (2, 3, 4, rows.engine.gamma + 1):
        rows.take([2, 0, 1], [1, query, 2], 3)
    assert rows.pair.target.num_runs == 1, "the prompts"
    extents = [(each["T"], each["B_decode"], each["S_decode"]) for each in rows.pair.target.bound_extents]
    assert extents[:verifying] == [(1, 1, 1), (4, 4, 1), (2, 2, 1), (8, 6, 1)]
    assert extents[verifying:] == [(8, 4, rows.engine.gamma + 1), (16, 4, rows.engine.gamma + 1)]
    rows.take([0, 2, 1], [1, 1, 1], 3)
    assert len(rows.pair.target.bound_extents) == len(extents), "a bucket is bound once"


def test_prompts_are_one_call_wherever_their_rows_lie_and_however_long_they_are(rows: Rows) -> None:
    rows.take([1], [9], 0)
    rows.take([1, 0, 5, 4], [2, 40, 1, 20], 1)
    rows.take([0, 1, 4, 5], [2, 2, 12, 12], 2)
    assert rows.pair.target.num_runs == 3


def test_a_prompt_chunk_with_more_to_come_asks_for_no_logits(rows: Rows) -> None:
    step = rows.conversations.step([3], [7], 0)
    step.batch = replace(step.batch, logit_rows=np.empty(0, np.int64))
    rows.check(step)


def test_only_the_logit_rows_asked_for_come_back(rows: Rows) -> None:
    rows.take([0, 1], [5, 4], 0)
    step = rows.conversations.step([0, 1], [3, 2], 2)
    step.batch = replace(step.batch, logit_rows=np.array([1, 4]))
    rows.check(step)


def test_a_row_fills_to_its_last_position_beside_a_long_chunk(rows: Rows) -> None:
    rows.take([0], [50], 0)
    rows.take([0], [45], 0)
    rows.take([0, 1], [1, 40], 1)
    assert len(rows.conversations.tokens[0]) == LIMITS.max_seq_len
    with pytest.raises(CapacityError, match="97 positions, max_seq_len is 96"):
        rows.engine.forward(rows.conversations.step([0], [1], 1).batch)


def test_calls_beyond_the_limits_are_refused(rows: Rows) -> None:
    conversations = Conversations(num_rows=9, vocab_size=97)
    with pytest.raises(CapacityError, match="65 packed tokens exceeds max_batch_tokens 64"):
        rows.engine.forward(conversations.step([0, 1], [60, 5], 0).batch)
    with pytest.raises(CapacityError, match="max_requests 6"):
        rows.engine.forward(conversations.step([6], [1], 1).batch)
    with pytest.raises(CapacityError, match="an anchor and 5 drafts"):
        rows.engine.forward(conversations.step([0], [7], 1).batch)


def test_a_request_whose_numbers_overflow_does_not_spoil_its_neighbours(rows: Rows) -> None:
    rows.take([0, 1, 2], [9, 12, 4], 0)
    spoil_row(rows.engine.cache, rows.pair.tables[1], slice(5, 6))
    step = rows.conversations.step([1, 2, 0], [2, 4, 1], 3)
    output, expected = rows.engine.forward(rows.with_tables(step)).logits.numpy(), rows.reference.forward(step.batch)
    assert np.isnan(output[:2]).all()
    np.testing.assert_allclose(output[2:], expected.logits[2:], atol=TOLERANCE, rtol=0)


def test_a_failing_backend_is_an_error_of_the_project_and_leaves_the_engine_usable(rows: Rows) -> None:
    rows.take([0], [4], 0)
    rows.pair.target.is_failing = True
    for query, num_decode in (([1], 1), ([5], 0)):
        with pytest.raises(EngineBuildError):
            rows.engine.forward(rows.with_tables(rows.conversations.step([0], query, num_decode)))
    rows.pair.target.is_failing = False
    rows.take([0], [1], 1)


def test_without_tap_layers_taps_are_empty(tmp_path: Path) -> None:
    target, _ = make_pair(tmp_path)
    (tmp_path / "graphs").mkdir()
    common: dict[str, Any] = {"limits": LIMITS, "gamma": 0, "precision": "fp32", "attention": "paged"}
    write_target_graph(target, tmp_path / "graphs", taps=(), **common)
    session = OnnxRuntimeDeviceSession(tmp_path / "graphs" / bindings.TARGET_GRAPH)
    dims = target_dims_from_metadata(session.metadata, bindings.TARGET_GRAPH)
    session.inputs, session.outputs = bindings.target_inputs(dims), bindings.target_outputs(dims)
    pages = PageLimits(1 + LIMITS.max_requests * dims.cache.table_width, 64, dims.cache.table_width, 1)
    engine = DeviceTargetEngine(session, dims, pages, torch.device("cpu"), gamma=0)
    conversations = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    for query, num_decode in ((3, 0), (1, 1)):
        step = conversations.step([0], [query], num_decode)
        assert engine.forward(step.batch).taps.shape == (query, 0)
        conversations.commit(step, [query])


def test_pages_that_do_not_fit_are_refused_with_their_size() -> None:
    cache = CacheDims(num_layers=1 << 10, num_rows=1, num_kv_heads=8, capacity=1 << 17, head_dim=128, page_positions=64)
    dims = TargetDims(LIMITS, cache, "paged", vocab_size=97, hidden_size=32, num_taps=0)
    with pytest.raises(EngineBuildError, match=r"16777216 pages of 64 positions take \d+\.\d+ GiB, .*--gpu-mem"):
        DevicePages(dims, PageLimits(1 << 24, 64, 1 << 11, 8), torch.device("cpu"))
