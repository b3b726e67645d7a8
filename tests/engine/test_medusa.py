"""Medusa in its published forms: drafts and logits equal to PyTorch over steps with rejections, from the very state
that Hugging Face calls last, and the target's own tokens and distribution through the loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.protocol import DraftBatch, IngestBatch, TargetBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from tests.engine.test_drafter_forms_in_loops import requests
from tests.engine.test_onnxruntime_drafter import LIMITS, Contexts, assert_same_drafts
from tests.support.conversations import open_pair
from tests.support.device_cases import LIMITS as SMALL_LIMITS
from tests.support.device_cases import Pair as SmallPair
from tests.support.device_cases import check_distribution
from tests.support.factories import target_embed_and_head, write_target
from tests.support.medusa_forms import Head, MedusaOracle, head_logits, random_heads, write_medusa, write_vllm_medusa
from tests.support.toy_engines import make_loop, run

TOKEN_MAP = np.random.default_rng(3).permutation(97)[:40]  # in no order, as vLLM takes it
CASES: dict[str, dict[str, Any]] = {
    "Medusa": {},
    "Medusa, two blocks, prefixed": {"num_blocks": 2, "prefix": "medusa_head."},
    "Medusa, no blocks": {"num_blocks": 0},
    "vLLM": {"has_bias": False},
    "vLLM, one matrix": {"is_shared": True},
    "vLLM, token map": {"token_map": TOKEN_MAP},
    "vLLM, token map of whole matrices": {"token_map": TOKEN_MAP, "is_map_applied": False, "is_shared": True},
}


def write_pair(tmp_path: Path, case: str) -> tuple[TargetCheckpoint, DrafterCheckpoint, list[Head]]:
    """And the heads as they are meant."""
    options = dict(CASES[case])
    folder = write_target(tmp_path / "target", family="qwen3", tied=True)
    heads = random_heads(folder, num_heads=5, num_blocks=options.pop("num_blocks", 1))
    if options.get("is_shared"):
        heads = [(blocks, heads[0][1]) for blocks, _ in heads]
    (write_vllm_medusa if case.startswith("vLLM") else write_medusa)(tmp_path / "drafter", heads, **options)
    if not options.get("has_bias", True):
        heads = [([(weight, np.zeros_like(bias)) for weight, bias in blocks], matrix) for blocks, matrix in heads]
    target = read_target(str(folder))
    drafter = read_drafter(str(tmp_path / "drafter"), target)
    check_pairing(target, drafter)
    return target, drafter, heads


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_oracle_and_greedy_tokens_are_the_targets(case: str, tmp_path: Path) -> None:
    target, drafter, heads = write_pair(tmp_path, case)
    engines = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    contexts = Contexts(engines[1], MedusaOracle(heads, LIMITS, drafter.draft_ids), tap_width=32, seed=4)
    for num_slots in (5, 5, 3, 1):
        rows = contexts.random.permutation(LIMITS.max_requests)[: contexts.random.integers(1, LIMITS.max_requests + 1)]
        contexts.ingest(rows.tolist(), contexts.random.integers(1, 9, len(rows)).tolist())
        block = contexts.block(rows.tolist())
        block = replace(block, uniforms=block.uniforms[:, :num_slots])
        assert_same_drafts(*(engine.draft(block) for engine in contexts.engines))
    plain: Any = run(make_loop(engines[0], None, SchedulerConfig("off")), requests())  # type: ignore[arg-type]
    outputs = run(make_loop(*engines, SchedulerConfig("fixed")), requests())  # type: ignore[arg-type]
    assert {key: each.token_ids for key, each in outputs.items()} == {
        key: each.token_ids for key, each in plain.items()
    }


def test_heads_read_the_state_behind_the_final_norm_of_the_last_position_before_the_anchor(tmp_path: Path) -> None:
    target, drafter, heads = write_pair(tmp_path, "Medusa")
    engines = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    model = AutoModel.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    tokens, row, length = np.arange(9, 20), np.array([2]), np.array([11])
    with torch.no_grad():
        state = model(torch.from_numpy(tokens[None]), use_cache=False).last_hidden_state[0, -1:]
        expected = torch.stack([head_logits(head, state)[0] for head in heads]).numpy()
    taps = engines[0].forward(TargetBatch(tokens, row, np.array([0]), length, 0, np.array([10]))).taps
    engines[1].ingest(IngestBatch(np.array(taps), row, np.array([0]), length))
    output = engines[1].draft(
        DraftBatch(row, np.array([1]), length, np.zeros(1, np.float32), np.zeros((1, 5), np.float32))
    )
    assert output.draft_logits is not None
    np.testing.assert_allclose(output.draft_logits[0], expected, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(output.draft_ids[0], expected.argmax(axis=1))


def test_fewer_heads_a_chosen_vocabulary_and_eight_bits(tmp_path: Path) -> None:
    target, _, heads = write_pair(tmp_path, "vLLM, token map")
    drafter = read_drafter(str(tmp_path / "drafter"), target, num_drafts=2)
    kept = np.sort(TOKEN_MAP)[::2]
    forms = DrafterForm(draft_vocab=kept), DrafterForm("int8", kept)
    engines = [open_pair(target, drafter, tmp_path / each.precision, limits=LIMITS, form=each)[1] for each in forms]
    contexts = Contexts(*engines, MedusaOracle(heads[:2], LIMITS, kept), tap_width=32)
    contexts.ingest([1, 4], [5, 3])
    engines[0].move_row(4, 0, 3)
    exact, quantised, expected = contexts.draft([4, 1])
    assert_same_drafts(exact, expected)
    exact_logits, quantised_logits = (np.asarray(each.draft_logits).copy() for each in (exact, quantised))
    assert 0 < np.abs(exact_logits - quantised_logits).mean() < 0.1 * np.abs(exact_logits).mean()
    block = replace(contexts.block([0]), anchor_ids=np.array([1]), past_lengths=np.array([3]))
    np.testing.assert_allclose(engines[0].draft(block).draft_logits[0], exact_logits[0], atol=1e-5)  # type: ignore[index]


def test_a_matrix_that_is_the_targets_head_is_the_targets(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    head = target_embed_and_head(folder)["lm_head.weight"]
    heads = [(blocks, head) for blocks, _ in random_heads(folder)]
    target = read_target(str(folder))
    drafter = read_drafter(str(write_vllm_medusa(tmp_path / "drafter", heads, is_shared=True)), target)
    assert not drafter.spec.has_own_head
    engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)[1]
    contexts = Contexts(engine, MedusaOracle(heads, LIMITS), tap_width=32)
    contexts.ingest([1, 4], [5, 3])
    assert_same_drafts(*contexts.draft([4, 1]))


@pytest.mark.parametrize("mode", ["fixed", "lagged_budget"])
def test_sampled_texts_have_the_targets_distribution(mode: str, tmp_path: Path) -> None:
    """Chi-square over all texts of three tokens of five ids, of which the heads propose three."""
    folder = write_target(tmp_path / "target", family="qwen3", vocab_size=5)
    heads = random_heads(folder, num_heads=3)
    drafter = write_vllm_medusa(tmp_path / "drafter", heads, token_map=np.array([3, 0, 2]))
    target = read_target(str(folder))
    pair = SmallPair(target, read_drafter(str(drafter), target))
    engines: Any = open_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=SMALL_LIMITS)
    engines = SimpleNamespace(target=engines[0], drafter=engines[1], step=None, acceptance=None, pages=None)
    check_distribution(engines, pair, SchedulerConfig(mode), num_samples=500)  # type: ignore[arg-type]
