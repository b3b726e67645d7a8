"""The device draft engine, over ONNX Runtime on the tensors' memory, against the PyTorch oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.protocol import DraftBatch, DraftEngine, DraftOutput, EngineLimits, IngestBatch
from dspark_trt.errors import CapacityError, EngineBuildError
from dspark_trt.reference.engines import open_reference_engines
from tests.support.conversations import open_pair, read_pair
from tests.support.factories import write_drafter, write_target
from tests.support.onnxruntime_device_session import DevicePair, open_device_pair, spoil, valid_positions

LIMITS = EngineLimits(max_requests=5, max_seq_len=96, max_batch_tokens=64)
TAPS = (-1, 1, 3)
TAP_WIDTH = len(TAPS) * 32
TOLERANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"head_type": "gated"},
    "rnn": {"head_type": "rnn"},
    "no confidence head": {"confidence": False},
    "DFlash": {"markov_rank": 0, "confidence": False},
    "own embedding and head, gamma 7": {"embed_head": "different", "gamma": 7},
    "gamma 1": {"gamma": 1, "layers": 1},
}


def open_engines(folder: Path, **drafter: Any) -> tuple[DevicePair, DraftEngine]:
    target_folder = write_target(folder / "target", family="qwen3", tied=True)
    checkpoints = read_pair(target_folder, write_drafter(folder / "drafter", target_folder, taps=TAPS, **drafter))
    pair = open_device_pair(*checkpoints, folder / "graphs", limits=LIMITS)
    return pair, open_reference_engines(*checkpoints, limits=LIMITS)[1]


class Contexts:
    """Random taps and lengths of every row; the same calls go to both engines, with garbage around the device's."""

    def __init__(self, pair: DevicePair, reference: DraftEngine, seed: int = 0) -> None:
        self.pair = pair
        self.engine = pair.engines.drafter
        self.reference = reference
        self.lengths = np.zeros(LIMITS.max_requests, np.int64)
        self.random = np.random.default_rng(seed)
        pair.tables[:] = self.random.permutation(pair.tables.ravel()).reshape(pair.tables.shape)

    def ingest(self, rows: list[int], query: list[int]) -> None:
        taps = self.random.standard_normal((sum(query), TAP_WIDTH)).astype(np.float32)
        arrays = np.array(rows), self.lengths[rows], np.array(query)
        self.spoil()
        before = valid_positions(self.pair, self.lengths, self.engine.cache)
        tables = self.pair.tables[rows]
        self.engine.ingest(IngestBatch(torch.from_numpy(taps), *arrays, block_tables=tables))
        self.reference.ingest(IngestBatch(taps, *arrays))
        after = valid_positions(self.pair, self.lengths, self.engine.cache)
        for row, (old, new) in enumerate(zip(before, after, strict=True)):
            assert torch.equal(old, new), f"valid positions of row {row} were written"
        self.lengths[rows] += query

    def draft(self, rows: list[int]) -> None:
        count = len(rows)
        batch = DraftBatch(
            rows=np.array(rows),
            anchor_ids=self.random.integers(0, 97, count),
            past_lengths=self.lengths[rows],
            temperatures=self.random.choice([0.0, 0.7, 1.0], count).astype(np.float32),
            uniforms=self.random.random((count, self.engine.gamma), dtype=np.float32),
            block_tables=self.pair.tables[rows],
        )
        self.spoil()
        assert_same_drafts(self.engine.draft(batch), self.reference.draft(batch))

    def move(self, source: int, destination: int) -> None:
        """Pages stay where they are."""
        self.pair.tables[[source, destination]] = self.pair.tables[[destination, source]]
        for engine in (self.engine, self.reference):
            engine.move_row(source, destination, int(self.lengths[source]))
        self.lengths[destination], self.lengths[source] = self.lengths[source], 0

    def spoil(self) -> None:
        spoil(self.pair, np.zeros(LIMITS.max_requests, np.int64), self.lengths)


def assert_same_drafts(output: DraftOutput, expected: DraftOutput) -> None:
    np.testing.assert_allclose(output.draft_logits.numpy(), expected.draft_logits, atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(output.draft_ids.numpy(), expected.draft_ids)
    if expected.confidence_logits is None:
        assert output.confidence_logits is None
    else:
        found = output.confidence_logits.numpy()
        np.testing.assert_allclose(found, expected.confidence_logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_oracle_over_steps_with_rejections_moves_and_reuse(case: str, tmp_path: Path) -> None:
    contexts = Contexts(*open_engines(tmp_path, **CASES[case]), seed=sum(case.encode()))
    for index in range(10):
        rows = contexts.random.permutation(LIMITS.max_requests)[: contexts.random.integers(1, LIMITS.max_requests + 1)]
        rows = [row for row in rows.tolist() if contexts.lengths[row] < LIMITS.max_seq_len - 12] or [0]
        if contexts.lengths[rows[0]] >= LIMITS.max_seq_len - 12 or index % 4 == 3:
            contexts.lengths[rows[0]] = 0  # another request takes the row
        contexts.ingest(rows, contexts.random.integers(1, 12 if index % 3 else 3, len(rows)).tolist())
        contexts.draft(rows)
        if index == 5 and 4 in rows and len(rows) < 5:
            contexts.move(4, next(row for row in range(5) if row not in rows))


def test_prompts_are_ingested_in_one_call_wherever_their_rows_lie(tmp_path: Path) -> None:
    contexts = Contexts(*open_engines(tmp_path))
    contexts.ingest([4, 0, 1], [40, 20, 1])
    assert contexts.pair.ingest.num_runs == 1
    contexts.draft([0, 4, 1])


def test_committed_tokens_and_drafts_take_few_buckets(tmp_path: Path) -> None:
    contexts = Contexts(*open_engines(tmp_path))
    for rows in ([0, 1, 2], [2, 0, 1], [0, 1, 2]):
        contexts.ingest(rows, contexts.random.integers(1, 3, 3).tolist() if contexts.lengths[0] else [2, 2, 1])
        contexts.draft(rows)
    assert contexts.pair.ingest.num_runs == 0
    assert {each["B_context"] for each in contexts.pair.ingest.bound_extents} == {4}
    assert [each["R"] for each in contexts.pair.draft.bound_extents] == [4]


def test_drafts_equal_those_of_the_onnxruntime_engine_of_the_same_drafter(tmp_path: Path) -> None:
    target_folder = write_target(tmp_path / "target", family="qwen3", tied=True)
    drafter = write_drafter(tmp_path / "drafter", target_folder, taps=TAPS, head_type="gated")
    checkpoints = read_pair(target_folder, drafter)
    pair = open_device_pair(*checkpoints, tmp_path / "graphs", limits=LIMITS)
    assert pair.drafter_dims.attention == "paged"
    contexts = Contexts(pair, open_pair(*checkpoints, tmp_path / "rows", limits=LIMITS)[1])
    contexts.ingest([3, 1], [9, 5])
    contexts.draft([1, 3])


def test_taps_of_numpy_and_of_other_float_types_are_converted(tmp_path: Path) -> None:
    """An engine in bfloat16 gives taps of its own type; a measurement may hand numpy arrays."""
    pair, _ = open_engines(tmp_path)
    engine = pair.engines.drafter
    engine.ingest(IngestBatch(np.zeros((6, TAP_WIDTH), np.float32), np.array([1]), np.array([0]), np.array([6])))
    taps = torch.randn((6, TAP_WIDTH)).to(torch.bfloat16)
    rows, past, query = np.array([1]), np.array([0]), np.array([6])
    lengths = np.array([0, 6, 0, 0, 0])
    engine.ingest(IngestBatch(taps, rows, past, query))
    found = valid_positions(pair, lengths, engine.cache)[1]
    engine.ingest(IngestBatch(taps.float().numpy(), rows, past, query))
    assert torch.equal(valid_positions(pair, lengths, engine.cache)[1], found)
    assert found.abs().max() > 0
    engine.ingest(IngestBatch(taps.double().repeat(2, 1), rows, past, query * 2))
    np.testing.assert_allclose(valid_positions(pair, lengths, engine.cache)[1], found, atol=1e-5)


def test_an_anchor_on_the_last_position_still_drafts(tmp_path: Path) -> None:
    contexts = Contexts(*open_engines(tmp_path, gamma=7))
    contexts.ingest([0, 1], [40, 2])
    contexts.ingest([0], [LIMITS.max_seq_len - 41])
    contexts.draft([0, 1])
    with pytest.raises(CapacityError, match="97 positions, max_seq_len is 96"):
        contexts.ingest([0], [2])


def test_calls_beyond_the_limits_are_refused(tmp_path: Path) -> None:
    pair, _ = open_engines(tmp_path)
    engine, none = pair.engines.drafter, np.zeros(1, np.int64)
    with pytest.raises(CapacityError, match="65 packed tokens exceeds max_batch_tokens 64"):
        engine.ingest(IngestBatch(np.zeros((65, TAP_WIDTH), np.float32), none, none, none + 65))
    uniforms = np.zeros((1, engine.gamma), np.float32)
    with pytest.raises(CapacityError, match="max_requests 5"):
        engine.draft(DraftBatch(none + 5, none, none, np.zeros(1, np.float32), uniforms))


def test_a_failing_backend_is_an_error_of_the_project(tmp_path: Path) -> None:
    contexts = Contexts(*open_engines(tmp_path))
    contexts.ingest([0], [4])
    for session, call in (
        (contexts.pair.ingest, lambda: contexts.ingest([0], [1])),
        (contexts.pair.draft, lambda: contexts.draft([0])),
    ):
        session.is_failing = True
        with pytest.raises(EngineBuildError):
            call()
        session.is_failing = False
    contexts.draft([0])


def test_without_a_confidence_head_the_margin_is_bound(tmp_path: Path) -> None:
    pair, _ = open_engines(tmp_path, confidence=False)
    assert bindings.CONFIDENCE_LOGITS in {each.name for each in pair.draft.outputs}
    assert bindings.CONFIDENCE_LOGITS in pair.engines.drafter.fetched.tensors
