"""Drafters with fewer ids, fewer slots, top-n or eight bits against the PyTorch oracle kept to the same choices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from dspark_trt.checkpoints.layout import HEAD
from dspark_trt.contract.bindings import Binding
from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.protocol import DraftOutput
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.linears import Linears
from dspark_trt.graphs.weights import WeightFolder
from dspark_trt.reference.engines import ReferenceDraftEngine, open_reference_engines
from dspark_trt.reference.heads import ReferenceHeads
from tests.engine.test_onnxruntime_drafter import LIMITS, TAPS, Contexts, assert_same_drafts, pair
from tests.support.conversations import open_pair

GAMMA = 7
IDS = np.array([0, 3, 4, 9, 17, 30, 31, 32, 50, 64, 65, 80, 96], np.int64)
HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"head_type": "gated"},
    "rnn": {"head_type": "rnn"},
    "no confidence head": {"confidence": False},
    "DFlash": {"markov_rank": 0, "confidence": False},
    "own head": {"embed_head": "different"},
}


class KeptToIds:
    """The oracle's heads with every other base logit at -1e30: it has no probability, and its column is left out."""

    def __init__(self, heads: ReferenceHeads) -> None:
        self._heads = heads

    def draft(self, base_logits: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = torch.full_like(base_logits, -1e30)
        kept[..., IDS] = base_logits[..., IDS]
        draft_ids, draft_logits, confidence_logits = self._heads.draft(kept, *rest)
        return draft_ids, draft_logits[..., IDS], confidence_logits


def keep_to_ids(engine: ReferenceDraftEngine) -> None:
    engine._heads = KeptToIds(engine._heads)  # type: ignore[assignment]


def drafts(contexts: Contexts, num_slots: int, rows: list[int]) -> list[DraftOutput]:
    block = contexts.block(rows)
    block = replace(block, uniforms=block.uniforms[:, :num_slots])
    return [engine.draft(block) for engine in contexts.engines]


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("has_draft_vocab", [False, True])
def test_blocks_of_every_length_equal_the_oracle_kept_to_the_draft_vocabulary(
    case: str, has_draft_vocab: bool, tmp_path: Path
) -> None:
    target, drafter = pair(tmp_path, gamma=GAMMA, **HEADS[case])
    form = DrafterForm(draft_vocab=IDS if has_draft_vocab else None)
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS, form=form)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    if has_draft_vocab:
        keep_to_ids(reference)
        np.testing.assert_array_equal(engine.draft_vocab, IDS)
    contexts = Contexts(engine, reference, tap_width=len(TAPS) * 32, seed=sum(case.encode()))
    for num_slots in range(1, GAMMA + 1):
        contexts.ingest([3, 0, 4], [2, 7, 1])
        if num_slots in (5, 6):  # drafted as whole blocks, whose first slots see masks that the oracle's do not have
            continue
        output, expected = drafts(contexts, num_slots, [0, 3, 4])
        assert output.draft_ids.shape == (3, num_slots)
        assert_same_drafts(output, expected)


def test_five_slots_are_the_first_five_of_a_whole_block(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, gamma=GAMMA)
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    contexts = Contexts(engine, tap_width=len(TAPS) * 32)
    contexts.ingest([1, 2], [5, 3])
    block = contexts.block([2, 1])
    whole = engine.draft(block).draft_ids.copy()
    short = engine.draft(replace(block, uniforms=block.uniforms[:, :5]))
    np.testing.assert_array_equal(short.draft_ids, whole[:, :5])


def test_drafts_are_the_same_whether_or_not_somebody_reads_the_logits(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, gamma=GAMMA)
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS, form=DrafterForm(draft_vocab=IDS))
    contexts = Contexts(engine, tap_width=len(TAPS) * 32)
    contexts.ingest([1, 2], [5, 3])
    block = contexts.block([2, 1])
    ids = engine.draft(block).draft_ids.copy()
    without = engine.draft(replace(block, wants_logits=False))
    assert without.draft_logits is None
    np.testing.assert_array_equal(without.draft_ids, ids)
    assert np.isin(ids, IDS).all()


def test_top_n_keeps_to_the_largest_base_logits_of_the_draft_vocabulary(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, gamma=GAMMA, markov_rank=0, confidence=False)
    form = DrafterForm(draft_vocab=IDS, markov_top_n=4)
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS, form=form)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    keep_to_ids(reference)
    contexts = Contexts(engine, reference, tap_width=len(TAPS) * 32)
    contexts.ingest([1, 2], [5, 3])
    output, expected = drafts(contexts, 3, [2, 1])
    fourth = np.sort(expected.draft_logits, axis=-1)[..., -4:-3]
    is_kept = expected.draft_logits >= fourth
    np.testing.assert_array_equal(output.draft_logits > -1e30, is_kept)
    np.testing.assert_allclose(output.draft_logits[is_kept], expected.draft_logits[is_kept], atol=1e-4, rtol=0)


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
def test_a_drafter_in_eight_bits_is_near_the_float32_one(head_type: str, tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, gamma=GAMMA, head_type=head_type)
    forms = {"fp32": DrafterForm("fp32", IDS), "int8": DrafterForm("int8", IDS)}
    engines = [open_pair(target, drafter, tmp_path / name, limits=LIMITS, form=form)[1] for name, form in forms.items()]
    contexts = Contexts(*engines, tap_width=len(TAPS) * 32)
    contexts.ingest([1, 2], [5, 3])
    # slot 1 only: later ones may follow another token
    exact, quantised = (output.draft_logits[:, 0] for output in drafts(contexts, 2, [2, 1]))
    assert 0 < np.abs(exact - quantised).mean() < 0.1 * np.abs(exact).mean()


def test_a_row_in_eight_bits_is_bit_for_bit_the_same_in_any_batch(tmp_path: Path) -> None:
    _, drafter = pair(tmp_path, embed_head="different")
    builder = GraphBuilder("rows")
    builder.input(Binding("x", "float32", ("T", 32)))
    builder.output(Binding("y", "float32", ("T", 97)))
    with WeightFolder(tmp_path, "rows", drafter.weights) as weights:
        Linears(builder, weights, "rows", "float32")("x", HEAD, output="y")
        builder.save(tmp_path / "rows.onnx", {})
    session = onnxruntime.InferenceSession(tmp_path / "rows.onnx", providers=["CPUExecutionProvider"])
    x = np.random.default_rng(3).standard_normal((56, 32)).astype(np.float32)
    x[5] *= 1000  # an outlier row, which a scale of the whole tensor would follow
    (whole,) = session.run(["y"], {"x": x})
    for size in (1, 3, 8, 32):
        for begin in range(0, 48, size):
            part = x[begin : begin + size]
            np.testing.assert_array_equal(session.run(["y"], {"x": part})[0], whole[begin : begin + len(part)])
    exact = x @ np.asarray(drafter.weights.array(HEAD), np.float32).T
    assert np.abs(whole - exact).mean(axis=1).max() > 0
    assert (np.abs(whole - exact).mean(axis=1) < 0.03 * np.abs(exact).mean(axis=1)).all()
