"""EAGLE-3 in every trainer's form: the taps that the trainer took, drafts and logits equal to an oracle that keeps no
cache, over steps with rejections, and the target's own tokens and distribution through the loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.reference.engines import open_reference_engines
from tests.engine.test_drafter_forms_in_loops import requests
from tests.engine.test_onnxruntime_drafter import LIMITS, Contexts, assert_same_drafts
from tests.support.conversations import Conversations, open_pair, open_target, read_pair
from tests.support.device_cases import LIMITS as SMALL_LIMITS
from tests.support.device_cases import Pair as SmallPair
from tests.support.device_cases import check_distribution
from tests.support.drafter_dialects import DRAFT_IDS
from tests.support.eagle3_dialects import write_eagle3
from tests.support.factories import write_target
from tests.support.toy_engines import make_loop, run

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSpec": ("deepspec", {"layer_ids": (0, 1, 2, 3), "embed_head": "equal"}),
    "SpecForge": ("community", {"layer_ids": (0, 1, 3), "draft_ids": DRAFT_IDS, "rope": YARN}),
    "SpecForge, norms of taps": ("community", {"layer_ids": (0, 1, 3), "tap_norm": "each"}),
    "DART": ("dart", {"extra": {"target_layer_ids": [0, 1, 2]}}),
    "DART, fewer ids": ("dart", {"extra": {"target_layer_ids": [0, 1, 2]}, "draft_ids": DRAFT_IDS}),
    "DART, head_dim 10, which falls back": (
        "dart",
        {"extra": {"target_layer_ids": [0, 1, 2]}, "heads": 6, "kv_heads": 3, "head_dim": 10},
    ),
    "speculators": ("speculators", {"layer_ids": (0, 2, 4), "draft_ids": DRAFT_IDS}),
    "speculators, 3.1": ("speculators", {"layer_ids": (1, 4), "tap_norm": "joint", "extra": {"norm_output": True}}),
    "head_dim 10, which falls back": ("deepspec", {"heads": 6, "kv_heads": 3, "head_dim": 10}),
}


def write_pair(tmp_path: Path, case: str) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    dialect, options = CASES[case]
    target = write_target(tmp_path / "target", family="qwen3", tied=dialect == "deepspec")
    return read_pair(target, write_eagle3(tmp_path / "drafter", target, dialect, **options))


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_oracle_and_greedy_tokens_are_the_targets(case: str, tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path, case)
    engines = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    contexts = Contexts(engines[1], reference, tap_width=drafter.spec.num_taps * 32, seed=4)
    for _ in range(4):
        rows = contexts.random.permutation(LIMITS.max_requests)[: contexts.random.integers(1, LIMITS.max_requests + 1)]
        # what a call for drafts has written behind the context is overwritten here
        contexts.ingest(rows.tolist(), contexts.random.integers(1, 9, len(rows)).tolist())
        assert_same_drafts(*contexts.draft(rows.tolist()))
    plain: Any = run(make_loop(engines[0], None, SchedulerConfig("off")), requests())  # type: ignore[arg-type]
    outputs = run(make_loop(*engines, SchedulerConfig("fixed")), requests())  # type: ignore[arg-type]
    assert {key: each.token_ids for key, each in outputs.items()} == {
        key: each.token_ids for key, each in plain.items()
    }


@pytest.mark.parametrize(
    ("dialect", "layer_ids", "inputs"),
    [("deepspec", (0, 4, 7), (1, 5, 8)), ("community", None, (2, 4, 5)), ("speculators", (0, 3, 6), (0, 3, 6))],
)
def test_taps_are_those_that_the_trainer_took(
    dialect: str, layer_ids: tuple[int, ...] | None, inputs: tuple[int, ...], tmp_path: Path
) -> None:
    """`inputs`: numbers of Hugging Face's hidden_states, by the trainer's own code."""
    target_folder = write_target(tmp_path / "target", family="qwen3", layers=8)
    target, drafter = read_pair(
        target_folder, write_eagle3(tmp_path / "drafter", target_folder, dialect, layer_ids=layer_ids)
    )
    engine = open_target(
        target,
        tmp_path / "graphs",
        taps=drafter.spec.target_layer_ids,
        norm_last_tap=drafter.spec.is_last_tap_normed,
        limits=LIMITS,
    )
    step = Conversations(num_rows=1, vocab_size=97).step([0], [11], num_decode=0)
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.from_numpy(step.batch.token_ids)[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0] for layer in inputs], dim=-1).numpy()
    np.testing.assert_allclose(engine.forward(step.batch).taps, expected, atol=1e-4, rtol=0)


def test_blocks_of_every_length_equal_the_oracle_in_a_chosen_vocabulary(tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path, "speculators")
    drafter = replace(drafter, spec=replace(drafter.spec, gamma=7))
    kept = DRAFT_IDS[::2]
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS, form=DrafterForm(draft_vocab=kept))
    assert engine.draft_vocab is not None
    np.testing.assert_array_equal(engine.draft_vocab, kept)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    reference.keep_to(kept)  # type: ignore[union-attr]
    contexts = Contexts(engine, reference, tap_width=drafter.spec.num_taps * 32, seed=5)
    for num_slots in range(1, 8):
        contexts.ingest([3, 0, 4], [2, 7, 1])
        block = contexts.block([0, 3, 4])
        block = replace(block, uniforms=block.uniforms[:, :num_slots])
        output, expected = (each.draft(block) for each in contexts.engines)
        assert output.draft_ids.shape == (3, num_slots)
        assert_same_drafts(output, expected)


def test_a_moved_row_drafts_as_before(tmp_path: Path) -> None:
    """Its feature of the last position moves with its K/V."""
    target, drafter = write_pair(tmp_path, "DeepSpec")
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    contexts = Contexts(engine, tap_width=drafter.spec.num_taps * 32)
    contexts.ingest([0, 4], [6, 9])
    block = contexts.block([4])
    before = engine.draft(block).draft_ids.copy()
    engine.move_row(4, 1, 9)
    np.testing.assert_array_equal(engine.draft(replace(block, rows=np.array([1]))).draft_ids, before)


def test_a_drafter_in_eight_bits_is_near_the_float32_one(tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path, "SpecForge")
    engines = [
        open_pair(target, drafter, tmp_path / form, limits=LIMITS, form=DrafterForm(form))[1]  # type: ignore[arg-type]
        for form in ("fp32", "int8")
    ]
    contexts = Contexts(*engines, tap_width=drafter.spec.num_taps * 32)
    contexts.ingest([1, 2], [5, 3])
    exact, quantised = (output.draft_logits[:, 0] for output in contexts.draft([2, 1]))  # type: ignore[index]
    assert 0 < np.abs(exact - quantised).mean() < 0.1 * np.abs(exact).mean()


@pytest.mark.parametrize("mode", ["fixed", "early_stop", "lagged_budget"])
def test_sampled_texts_have_the_targets_distribution(mode: str, tmp_path: Path) -> None:
    """Chi-square over all texts of three tokens of five ids, of which the drafter proposes three."""
    target_folder = write_target(tmp_path / "target", family="qwen3", vocab_size=5)
    folder = write_eagle3(tmp_path / "drafter", target_folder, "community", draft_ids=np.array([0, 2, 3]))
    pair = SmallPair(*read_pair(target_folder, folder))
    engines: Any = open_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=SMALL_LIMITS)
    engines = SimpleNamespace(target=engines[0], drafter=engines[1], step=None, acceptance=None, pages=None)
    check_distribution(engines, pair, SchedulerConfig(mode), num_samples=500)  # type: ignore[arg-type]
