"""A drafter whose head has rows for some ids only: graphs and the device's session against the oracle, and the loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt_plugins.markov_head.form import W2

from dspark_trt.checkpoints.layout import HEAD
from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.checkpoints.views import SelectedRows
from dspark_trt.contract import bindings
from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.reference.draft_session import TorchDraftSession
from dspark_trt.reference.engines import open_reference_engines
from tests.engine.test_drafter_forms_in_loops import requests
from tests.engine.test_onnxruntime_drafter import LIMITS, TAPS, Contexts, assert_same_drafts, pair
from tests.engine.test_torch_sessions import DRAFT, Pair
from tests.engine.test_torch_sessions import LIMITS as DEVICE_LIMITS
from tests.support.conversations import open_pair
from tests.support.onnxruntime_device_session import write_device_graphs
from tests.support.session_calls import POISONS, copied, draft_call, run_graph
from tests.support.toy_engines import make_loop, run

IDS = np.array([0, 3, 4, 9, 17, 30, 31, 32, 50, 64, 65, 80, 96], np.int64)
HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"head_type": "gated"},
    "DFlash": {"markov_rank": 0, "confidence": False},
}


def reduced_pair(tmp_path: Path, head: str) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    target, drafter = pair(tmp_path, embed_head="different", **HEADS[head])
    weights = SelectedRows(drafter.weights, {HEAD: IDS, W2: IDS})
    return target, DrafterCheckpoint(replace(drafter.spec, draft_vocab_size=len(IDS)), weights, IDS)


@pytest.mark.parametrize("head", HEADS)
def test_drafts_equal_the_reference_over_steps_with_rejections(head: str, tmp_path: Path) -> None:
    target, drafter = reduced_pair(tmp_path, head)
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    assert engine.draft_vocab is not None
    np.testing.assert_array_equal(engine.draft_vocab, IDS)
    contexts = Contexts(engine, reference, tap_width=len(TAPS) * 32, seed=3)
    for _ in range(4):
        rows = contexts.random.permutation(LIMITS.max_requests)[:3]
        contexts.ingest(rows.tolist(), contexts.random.integers(1, 9, len(rows)).tolist())
        assert_same_drafts(*contexts.draft(rows.tolist()))


def test_a_vocabulary_chosen_at_build_keeps_those_that_the_head_has(tmp_path: Path) -> None:
    target, drafter = reduced_pair(tmp_path, "vanilla")
    form = DrafterForm(draft_vocab=np.arange(30, 90))
    _, whole = open_pair(target, drafter, tmp_path / "whole", limits=LIMITS)
    _, chosen = open_pair(target, drafter, tmp_path / "chosen", limits=LIMITS, form=form)
    assert chosen.draft_vocab is not None
    np.testing.assert_array_equal(chosen.draft_vocab, [30, 31, 32, 50, 64, 65, 80])
    contexts = Contexts(whole, chosen, tap_width=len(TAPS) * 32)
    contexts.ingest([0], [5])
    first, second = (output.draft_logits for output in contexts.draft([0]))
    assert first is not None
    assert second is not None
    # of the first slot, which follows the same token
    np.testing.assert_allclose(second[:, 0], first[:, 0, np.isin(IDS, chosen.draft_vocab)], atol=1e-4, rtol=0)


@pytest.mark.parametrize("head", HEADS)
def test_on_a_device_every_other_id_has_no_probability(head: str, tmp_path: Path) -> None:
    target, drafter = reduced_pair(tmp_path, head)
    sessions = Pair(target, drafter)
    write_device_graphs(target, drafter, tmp_path / "graphs", limits=DEVICE_LIMITS)
    assert not (tmp_path / "graphs" / bindings.DRAFT_VOCAB_FILE).exists()
    tensors = draft_call(sessions.drafter_dims(), **DRAFT, poison=POISONS[1])
    expected = copied(tensors)
    TorchDraftSession(
        drafter.spec,
        sessions.weights(drafter),
        sessions.drafter_dims(),
        target_spec=target.spec,
        target_weights=sessions.weights(target),
        draft_ids=IDS,
    ).run(tensors)
    run_graph(tmp_path / "graphs" / bindings.DRAFT_GRAPH, expected)
    names = (bindings.DRAFT_IDS, bindings.DRAFT_LOGITS, bindings.CONFIDENCE_LOGITS)
    for name in names:
        torch.testing.assert_close(tensors[name], expected[name], atol=1e-4, rtol=1e-5)
    probabilities = expected[bindings.DRAFT_LOGITS].softmax(dim=-1)
    assert probabilities.shape[-1] == 97
    assert probabilities[..., IDS].sum(dim=-1).allclose(torch.ones(()))
    assert np.isin(expected[bindings.DRAFT_IDS].numpy(), IDS).all()


def test_greedy_tokens_are_those_of_plain_decoding(tmp_path: Path) -> None:
    target, engine = open_pair(*reduced_pair(tmp_path, "vanilla"), tmp_path / "graphs", limits=LIMITS)
    plain: Any = run(make_loop(target, None, SchedulerConfig("off")), requests())  # type: ignore[arg-type]
    outputs: Any = run(make_loop(target, engine, SchedulerConfig("fixed")), requests())  # type: ignore[arg-type]
    assert {key: each.token_ids for key, each in outputs.items()} == {
        key: each.token_ids for key, each in plain.items()
    }
