"""The ONNX Runtime draft engine against the PyTorch oracle:
every head and confidence form, steps deep, with rejections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.contract.protocol import DraftBatch, DraftEngine, DraftOutput, EngineLimits, IngestBatch
from dspark_trt.errors import CapacityError
from dspark_trt.reference.engines import open_reference_engines
from tests.support.conversations import open_pair, read_pair
from tests.support.factories import write_drafter, write_target

LIMITS = EngineLimits(max_requests=5, max_seq_len=96, max_batch_tokens=64)
TAPS = (-1, 1, 3)
TOLERANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"head_type": "gated"},
    "rnn": {"head_type": "rnn"},
    "vanilla, confidence without Markov input": {"confidence_with_markov": False},
    "gated, confidence without bias": {"head_type": "gated", "confidence_bias": False},
    "rnn, confidence without Markov input and bias": {
        "head_type": "rnn",
        "confidence_with_markov": False,
        "confidence_bias": False,
    },
    "no confidence head": {"confidence": False},
    "DFlash": {"markov_rank": 0, "confidence": False},
    "rank 0 with confidence head": {"markov_rank": 0},
    "own embedding and head": {"embed_head": "different"},
    "embedding and head equal to the target's": {"embed_head": "equal"},
    "bfloat16 in shards": {"dtype": "bfloat16", "shards": 2},
    "other heads, gamma 7": {"heads": 6, "kv_heads": 3, "head_dim": 16, "gamma": 7, "layers": 2},
    "gamma 1": {"gamma": 1, "layers": 1},
    "head_dim 10, which falls back": {"heads": 6, "kv_heads": 3, "head_dim": 10},
    "yarn": {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}},
}


def assert_same_drafts(output: DraftOutput, expected: DraftOutput) -> None:
    np.testing.assert_allclose(output.draft_logits, expected.draft_logits, atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(output.draft_ids, expected.draft_ids)
    if expected.confidence_logits is None:
        assert output.confidence_logits is None
    else:
        np.testing.assert_allclose(output.confidence_logits, expected.confidence_logits, atol=TOLERANCE, rtol=0)


class Contexts:
    """Random taps, tokens and lengths of every row; the same calls go to all engines."""

    def __init__(self, *engines: DraftEngine, tap_width: int, seed: int = 0) -> None:
        self.engines = engines
        self.lengths = np.zeros(engines[0].limits.max_requests, np.int64)
        self.next_ids = np.zeros(engines[0].limits.max_requests, np.int64)  # behind each row's positions: the anchors
        self.random = np.random.default_rng(seed)
        self._tap_width = tap_width

    def ingest(self, rows: list[int], query_lengths: list[int]) -> None:
        taps = self.random.standard_normal((sum(query_lengths), self._tap_width)).astype(np.float32)
        tokens = [self._more_tokens(row, length) for row, length in zip(rows, query_lengths, strict=True)]
        batch = IngestBatch(
            taps,
            np.array(rows),
            self.lengths[rows],
            np.array(query_lengths),
            token_ids=np.concatenate([each[:-1] for each in tokens]),
            next_ids=np.concatenate([each[1:] for each in tokens]),
        )
        for engine in self.engines:
            engine.ingest(batch)
        self.lengths[rows] += query_lengths

    def _more_tokens(self, row: int, count: int) -> np.ndarray:
        """The token that was said to follow, and `count` more."""
        tokens = np.append(self.next_ids[row], self.random.integers(0, 97, count))
        self.next_ids[row] = tokens[-1]
        return tokens

    def block(self, rows: list[int]) -> DraftBatch:
        count = len(rows)
        return DraftBatch(
            rows=np.array(rows),
            anchor_ids=self.next_ids[rows],
            past_lengths=self.lengths[rows],
            temperatures=self.random.choice([0.0, 0.7, 1.0], count).astype(np.float32),
            uniforms=self.random.random((count, self.engines[0].gamma), dtype=np.float32),
        )

    def draft(self, rows: list[int]) -> list[DraftOutput]:
        batch = self.block(rows)
        return [engine.draft(batch) for engine in self.engines]


def pair(tmp_path: Path, **drafter: Any) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    target_folder = write_target(tmp_path / "target", family="qwen3", tied=True)
    return read_pair(target_folder, write_drafter(tmp_path / "drafter", target_folder, taps=TAPS, **drafter))


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_reference_over_steps_with_rejections(case: str, tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, **CASES[case])
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    contexts = Contexts(engine, reference, tap_width=len(TAPS) * 32, seed=sum(case.encode()))
    for _ in range(5):
        rows = contexts.random.permutation(LIMITS.max_requests)[: contexts.random.integers(1, LIMITS.max_requests + 1)]
        # a drafted block leaves nothing behind: what is ingested next overwrites its place
        contexts.ingest(rows.tolist(), contexts.random.integers(1, 9, len(rows)).tolist())
        assert_same_drafts(*contexts.draft(rows.tolist()))


def test_ingesting_in_chunks_or_without_drafting_in_between_is_the_same(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    taps = np.random.default_rng(1).standard_normal((20, len(TAPS) * 32)).astype(np.float32)
    for row, chunks in ((0, [20]), (3, [1, 7, 12])):
        begin = 0
        for length in chunks:
            engine.ingest(
                IngestBatch(taps[begin : begin + length], np.array([row]), np.array([begin]), np.array([length]))
            )
            begin += length
    uniforms = np.full((2, engine.gamma), 0.4, np.float32)
    output = engine.draft(
        DraftBatch(np.array([3, 0]), np.array([5, 5]), np.array([20, 20]), np.ones(2, np.float32), uniforms)
    )
    np.testing.assert_allclose(output.draft_logits[0], output.draft_logits[1], atol=1e-5, rtol=0)


def test_what_is_ingested_in_the_same_call_is_what_was_ingested_before(tmp_path: Path) -> None:
    """Of rows that draft, before, between and behind them, and of others."""
    target, drafter = pair(tmp_path)
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    contexts = Contexts(engine, reference, tap_width=len(TAPS) * 32)
    contexts.ingest([0, 1, 2, 3, 4], [3, 9, 2, 5, 4])
    for ingested, lengths, rows in (([2, 1], [2, 1], [2, 1]), ([4, 0, 2], [7, 1, 2], [2, 3]), ([1], [3], [1])):
        taps = contexts.random.standard_normal((sum(lengths), len(TAPS) * 32)).astype(np.float32)
        batch = IngestBatch(taps, np.array(ingested), contexts.lengths[ingested], np.array(lengths))
        contexts.lengths[ingested] += lengths
        block = contexts.block(rows)
        reference.ingest(batch)
        assert_same_drafts(engine.draft(block, batch), reference.draft(block))
    assert_same_drafts(*contexts.draft([0, 1, 2, 3, 4]))


def test_moved_rows_draft_as_before(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    contexts = Contexts(engine, reference, tap_width=len(TAPS) * 32)
    contexts.ingest([0, 4], [6, 9])
    engine.move_row(4, 1, 9)
    reference.move_row(4, 1, 9)
    contexts.lengths[1] = 9
    contexts.ingest([4, 1], [3, 2])
    assert_same_drafts(*contexts.draft([1, 0]))


def test_an_anchor_on_the_last_position_still_drafts(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, gamma=7)
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    contexts = Contexts(engine, reference, tap_width=len(TAPS) * 32)
    contexts.ingest([0, 1], [LIMITS.max_seq_len - 1, 2])
    assert_same_drafts(*contexts.draft([0, 1]))
    with pytest.raises(CapacityError, match="97 positions, max_seq_len is 96"):
        contexts.ingest([0], [2])


def test_taps_of_the_target_engine_lead_to_the_drafts_of_the_reference_pair(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, head_type="gated")
    engines = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    references = open_reference_engines(target, drafter, limits=LIMITS)
    from tests.support.conversations import Conversations

    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    for _ in range(3):
        step = rows.random_step(max_query=6)
        accepted = rows.random_acceptance(step)
        begins = np.cumsum(step.batch.query_lengths) - step.batch.query_lengths
        kept = np.concatenate([begin + np.arange(count) for begin, count in zip(begins, accepted, strict=True)])
        outputs = []
        for target_engine, draft_engine in (engines, references):
            taps = np.asarray(target_engine.forward(step.batch).taps)[kept]
            draft_engine.ingest(IngestBatch(taps, step.batch.rows, step.batch.past_lengths, np.array(accepted)))
            outputs.append(
                draft_engine.draft(
                    DraftBatch(
                        rows=step.batch.rows,
                        anchor_ids=step.batch.rows + 3,
                        past_lengths=step.batch.past_lengths + accepted,
                        temperatures=np.zeros(len(accepted), np.float32),
                        uniforms=np.zeros((len(accepted), drafter.spec.gamma), np.float32),
                    )
                )
            )
        assert_same_drafts(*outputs)
        rows.commit(step, accepted)
