"""Draft blocks that are mask first, causal or see a window only: graphs and the device's sessions against the oracle,
and greedy tokens through the loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.checkpoints.spec import PLAIN_ATTENTION, BlockAttention, DrafterCheckpoint, TargetCheckpoint
from dspark_trt.contract import bindings
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.reference.engines import open_reference_engines
from tests.engine.test_drafter_forms_in_loops import Watched, requests
from tests.engine.test_onnxruntime_drafter import LIMITS, TAPS, Contexts, assert_same_drafts, pair
from tests.engine.test_onnxruntime_drafter_forms import drafts
from tests.engine.test_torch_sessions import DRAFT, Pair, assert_close
from tests.engine.test_torch_sessions import LIMITS as DEVICE_LIMITS
from tests.support.conversations import open_pair
from tests.support.onnxruntime_device_session import write_device_graphs
from tests.support.session_calls import POISONS, caches_of, copied, draft_call, run_graph
from tests.support.toy_engines import make_loop, run

CAUSAL, NEAR, NEAR_ANCHOR = BlockAttention(True), BlockAttention(window=8), BlockAttention(True, 6, "anchor")
FORMS: dict[str, dict[str, Any]] = {
    "mask first": {"is_mask_first": True},
    "causal": {"block_attention": (CAUSAL,) * 3},
    "window": {"block_attention": (NEAR,) * 3},
    "window from the anchor": {"block_attention": (NEAR_ANCHOR,) * 3},
    "mask first, and each layer another": {
        "is_mask_first": True,
        "block_attention": (PLAIN_ATTENTION, NEAR, NEAR_ANCHOR),
    },
}


def formed_pair(tmp_path: Path, form: str, **drafter: Any) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    target, checkpoint = pair(tmp_path, **drafter)
    return target, replace(checkpoint, spec=replace(checkpoint.spec, **FORMS[form]))


@pytest.mark.parametrize("form", FORMS)
def test_drafts_equal_the_reference_over_steps_with_rejections(form: str, tmp_path: Path) -> None:
    target, drafter = formed_pair(tmp_path, form)
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    contexts = Contexts(engine, reference, tap_width=len(TAPS) * 32, seed=sum(form.encode()))
    for _ in range(5):
        rows = contexts.random.permutation(LIMITS.max_requests)[: contexts.random.integers(1, LIMITS.max_requests + 1)]
        contexts.ingest(rows.tolist(), contexts.random.integers(1, 9, len(rows)).tolist())
        assert_same_drafts(*contexts.draft(rows.tolist()))
    for _ in range(2):  # until the anchor stands on the last position
        contexts.ingest([1], [int(LIMITS.max_seq_len - 1 - contexts.lengths[1]) // 2 or 1])
    if missing := int(LIMITS.max_seq_len - 1 - contexts.lengths[1]):
        contexts.ingest([1], [missing])
    assert_same_drafts(*contexts.draft([1]))


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_fewer_slots_equal_the_reference(form: str, tmp_path: Path) -> None:
    target, drafter = formed_pair(tmp_path, form, head_type="rnn")
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    contexts = Contexts(engine, reference, tap_width=len(TAPS) * 32)
    for num_slots in (1, 2, 3, 4):
        contexts.ingest([3, 0, 4], [2, 9, 1])
        output, expected = drafts(contexts, num_slots, [0, 3, 4])
        assert output.draft_ids.shape == (3, num_slots)
        assert_same_drafts(output, expected)


@pytest.mark.parametrize("form", FORMS)
def test_the_session_of_a_device_equals_its_graph(form: str, tmp_path: Path) -> None:
    sessions = Pair(*formed_pair(tmp_path, form))
    write_device_graphs(sessions.target, sessions.drafter, tmp_path / "graphs", limits=DEVICE_LIMITS)
    tensors = draft_call(sessions.drafter_dims(), **DRAFT, poison=POISONS[1])
    expected = copied(tensors)
    sessions.draft_session().run(tensors)
    run_graph(tmp_path / "graphs" / bindings.DRAFT_GRAPH, expected)
    assert_close(
        tensors,
        expected,
        [bindings.DRAFT_IDS, bindings.DRAFT_LOGITS, bindings.CONFIDENCE_LOGITS, *caches_of(tensors)],
    )


@pytest.mark.parametrize("form", ["mask first", "mask first, and each layer another"])
def test_greedy_tokens_are_those_of_plain_decoding(form: str, tmp_path: Path) -> None:
    target, engine = open_pair(
        *formed_pair(tmp_path, form, confidence=False, markov_rank=0), tmp_path / "graphs", limits=LIMITS
    )
    plain: Any = run(make_loop(target, None, SchedulerConfig("off")), requests())  # type: ignore[arg-type]
    for config in (SchedulerConfig("fixed"), SchedulerConfig("early_stop"), SchedulerConfig("lagged_budget")):
        drafter: Any = Watched(engine)
        outputs = run(make_loop(target, drafter, config), requests())  # type: ignore[arg-type]
        assert {key: each.token_ids for key, each in outputs.items()} == {
            key: each.token_ids for key, each in plain.items()
        }
        assert drafter.num_slots
