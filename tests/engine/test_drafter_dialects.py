"""Drafters in every trainer's form: the taps that the trainer took, drafts and logits equal to the oracle's over steps
with rejections, and greedy tokens through the loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_trt.checkpoints.spec import BlockDrafterSpec, DrafterCheckpoint, TargetCheckpoint
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.reference.engines import open_reference_engines
from dspark_trt.reference.on_device import open_device_reference_engines
from tests.engine.test_drafter_forms_in_loops import requests
from tests.engine.test_onnxruntime_drafter import LIMITS, Contexts, assert_same_drafts
from tests.support.conversations import Conversations, open_pair, open_target, read_pair
from tests.support.device_cases import LIMITS as SMALL_LIMITS
from tests.support.device_cases import (
    VOCABULARY,
    check_distribution,
    device_loop,
    greedy_requests,
    oracle_tokens,
    tokens_of,
)
from tests.support.device_cases import Pair as SmallPair
from tests.support.drafter_dialects import DRAFT_IDS, write_dialect
from tests.support.factories import write_target
from tests.support.onnxruntime_device_session import open_device_pair
from tests.support.toy_engines import make_loop, run

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = ((FULL, SLIDING, SLIDING), 8)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 32}
LEGACY = {"sample_from_anchor": None, "speculators_config": None}
# layer ids as the dialect counts them, the last of the four layers among them
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSpec": ("deepspec", {"layer_ids": (-1, 1, 3)}),
    "DeepSpec DFlash": ("deepspec-dflash", {"layer_ids": (0, 3)}),
    "Nemotron, sinks": ("nemotron", {"layer_ids": (1, 3), "block_size": 8}),
    "z-lab, sinks": (
        "z-lab",
        {"sinks": True, "sliding": MIXED, "extra": {"dflash_config": {"attention_sink_bias": True}}},
    ),
    "z-lab, sinks, head_dim 10, which falls back": (
        "z-lab",
        {
            "sinks": True,
            "extra": {"dflash_config": {"attention_sink_bias": True}},
            "heads": 6,
            "kv_heads": 3,
            "head_dim": 10,
        },
    ),
    "NeMo DSpark": ("nemo-dspark", {"layer_ids": (1, 3), "head_type": "gated"}),
    "NeMo DFlash": ("nemo-dflash", {"layer_ids": (1, 3), "sliding": MIXED}),
    "z-lab": ("z-lab", {"layer_ids": (1, 3), "block_size": 16}),
    "z-lab, sliding": ("z-lab", {"layer_ids": (1, 3), "sliding": MIXED}),
    "SpecForge, YaRN": ("specforge", {"layer_ids": (0, 3), "rope": YARN}),
    "SpecForge, first exports": ("specforge-nested", {"layer_ids": (0, 3)}),
    "speculators": ("speculators", {"layer_ids": (0, 2, 4), "head_type": "rnn"}),
    "speculators, older": ("speculators", {"layer_ids": (1, 4), "extra": LEGACY}),
    "speculators, sliding, fewer ids": ("speculators", {"layer_ids": (1, 4), "sliding": MIXED, "draft_ids": DRAFT_IDS}),
    "speculators DFlash": ("speculators-dflash", {"layer_ids": (1, 4), "extra": LEGACY, "draft_ids": DRAFT_IDS}),
}


def write_pair(tmp_path: Path, case: str) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    dialect, options = CASES[case]
    target = write_target(tmp_path / "target", family="qwen3")
    return read_pair(target, write_dialect(tmp_path / "drafter", target, dialect, **options))


def trained_taps(folder: Path, token_ids: np.ndarray, case: str) -> np.ndarray:
    """What the trainer fed the drafter, by its own rule, from transformers."""
    dialect, options = CASES[case]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda module, inputs, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
    with torch.no_grad():
        states = model(torch.from_numpy(token_ids)[None], output_hidden_states=True).hidden_states
    raw = [states[0][0], *(each if each.dim() == 2 else each[0] for each in outputs)]
    match dialect:
        case "speculators" | "speculators-dflash":  # vLLM counts what goes into a layer, and norms nothing
            taps = [raw[layer] for layer in options["layer_ids"]]
        case "nemo-dflash":  # hooks on the layers
            taps = [raw[layer + 1] for layer in options["layer_ids"]]
        case _:
            taps = [states[layer + 1][0] for layer in options["layer_ids"]]
    return torch.cat(taps, dim=-1).numpy()


@pytest.mark.parametrize("case", ["DeepSpec", "NeMo DSpark", "NeMo DFlash", "z-lab", "SpecForge, YaRN", "speculators"])
def test_taps_are_those_that_the_trainer_took(case: str, tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path, case)
    spec = drafter.spec
    engine = open_target(
        target,
        tmp_path / "graphs",
        taps=spec.target_layer_ids,
        norm_last_tap=spec.is_last_tap_normed,
        limits=LIMITS,
    )
    step = Conversations(num_rows=1, vocab_size=97).step([0], [11], num_decode=0)
    expected = trained_taps(tmp_path / "target", step.batch.token_ids, case)
    np.testing.assert_allclose(engine.forward(step.batch).taps, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_oracle_and_greedy_tokens_are_the_targets(case: str, tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path, case)
    engines = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    _, reference = open_reference_engines(target, drafter, limits=LIMITS)
    contexts = Contexts(engines[1], reference, tap_width=drafter.spec.num_taps * 32, seed=4)
    for _ in range(4):
        rows = contexts.random.permutation(LIMITS.max_requests)[: contexts.random.integers(1, LIMITS.max_requests + 1)]
        contexts.ingest(rows.tolist(), contexts.random.integers(1, 9, len(rows)).tolist())
        assert_same_drafts(*contexts.draft(rows.tolist()))
    plain: Any = run(make_loop(engines[0], None, SchedulerConfig("off")), requests())  # type: ignore[arg-type]
    outputs = run(make_loop(*engines, SchedulerConfig("fixed")), requests())  # type: ignore[arg-type]
    assert {key: each.token_ids for key, each in outputs.items()} == {
        key: each.token_ids for key, each in plain.items()
    }


@pytest.mark.parametrize("mode", ["early_stop", "lagged_budget"])
def test_the_runtime_of_a_device_gives_the_targets_greedy_tokens(mode: str, tmp_path: Path) -> None:
    """The same form in the device's runtime, whose step engine selects drafts itself in lagged_budget."""
    pair = small_pair(tmp_path, VOCABULARY, [0, 1, 2, 4, 5, 7, 8, 10])
    engines = open_device_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=SMALL_LIMITS).engines
    loop = device_loop(engines, SchedulerConfig(mode))  # type: ignore[arg-type]
    assert tokens_of(loop, greedy_requests()) == oracle_tokens(pair, greedy_requests())
    assert loop.totals.num_drafts_verified > 0


def test_sinks_draw_attention_from_positions(tmp_path: Path) -> None:
    """The oracle knows that it has sinks: without them it drafts from other logits."""
    target, drafter = write_pair(tmp_path, "z-lab, sinks")
    spec = drafter.spec
    assert isinstance(spec, BlockDrafterSpec)
    plain = tuple(replace(each, has_sink=False) for each in spec.block_attention)
    without = DrafterCheckpoint(replace(spec, block_attention=plain), drafter.weights)
    outputs = []
    for each in (drafter, without):
        _, engine = open_reference_engines(target, each, limits=LIMITS)
        contexts = Contexts(engine, engine, tap_width=spec.num_taps * 32, seed=4)
        contexts.ingest([0], [9])
        outputs.append(contexts.draft([0])[0].draft_logits)
    assert np.abs(outputs[0] - outputs[1]).max() > 0.1


@pytest.mark.parametrize("computed_by", ["ONNX Runtime", "PyTorch"])
def test_sinks_in_the_runtime_of_a_device(computed_by: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", family="qwen3", vocab_size=VOCABULARY)
    folder = write_dialect(tmp_path / "drafter", target, "nemotron", block_size=8, mask_token_id=VOCABULARY - 1)
    pair = SmallPair(*read_pair(target, folder))
    if computed_by == "PyTorch":
        engines = open_device_reference_engines(
            pair.target, pair.drafter, limits=SMALL_LIMITS, precision="fp32", device="cpu"
        )
    else:
        engines = open_device_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=SMALL_LIMITS).engines
    loop = device_loop(engines, SchedulerConfig("fixed"))
    assert tokens_of(loop, greedy_requests()) == oracle_tokens(pair, greedy_requests())
    assert loop.totals.num_drafts_verified > 0


def small_pair(tmp_path: Path, vocab_size: int, draft_ids: list[int]) -> SmallPair:
    """A mask-first block, sliding layers and a head for some of the ids."""
    target = write_target(tmp_path / "target", family="qwen3", vocab_size=vocab_size)
    drafter = write_dialect(
        tmp_path / "drafter",
        target,
        "speculators",
        layer_ids=(1, 4),
        sliding=MIXED,
        extra=LEGACY,
        draft_ids=np.array(draft_ids),
        mask_token_id=vocab_size - 1,
    )
    return SmallPair(*read_pair(target, drafter))


@pytest.mark.parametrize("mode", ["fixed", "early_stop", "lagged_budget"])
def test_sampled_texts_have_the_targets_distribution(mode: str, tmp_path: Path) -> None:
    """Chi-square over all texts of three tokens of five ids, of which the drafter proposes three."""
    pair = small_pair(tmp_path, 5, [0, 2, 3])
    engines: Any = open_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=SMALL_LIMITS)
    engines = SimpleNamespace(target=engines[0], drafter=engines[1], step=None, acceptance=None, pages=None)
    check_distribution(engines, pair, SchedulerConfig(mode), num_samples=500)  # type: ignore[arg-type]
