"""Targets of every family, saved by transformers: logits and taps are its own on every engine, greedy text too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.protocol import EngineLimits, TargetEngine
from dspark_trt.reference.engines import ReferenceTargetEngine
from dspark_trt.reference.weights import ReferenceWeights
from tests.support.conversations import Conversations, TransformersTarget, expected_outputs, open_target
from tests.support.transformers_targets import (
    VOCAB_SIZE,
    change_config,
    greedy_by_transformers,
    greedy_with_drafts,
    write_by_transformers,
)

LIMITS = EngineLimits(max_requests=4, max_seq_len=96, max_batch_tokens=64)
TOLERANCE = 1e-4
TAPS = (-1, 0, 3)
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2"},
    "qwen2 tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen2 with windows above a layer": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
    },
    "qwen3 with windows of some layers": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": MIXED,
    },
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral with a window": {"family": "mistral", "sliding_window": 7},
    "mistral with a window beyond any row": {"family": "mistral", "sliding_window": 1 << 40},
    "mistral with a window of one token": {"family": "mistral", "sliding_window": 1},
    "phi3": {"family": "phi3"},
    "phi3 with a window": {"family": "phi3", "sliding_window": 6, "num_key_value_heads": 1},
    "qwen3 moe": {"family": "qwen3_moe", **EXPERTS, "norm_topk_prob": True},
    "qwen3 moe in stacks, not normalised": {"family": "qwen3_moe", **EXPERTS, "in_stacks": True},
    "qwen3 moe with an MLP in some layers": {"family": "qwen3_moe", **EXPERTS, "mlp_only_layers": [1]},
    "qwen3 moe in every other layer, windows": {
        "family": "qwen3_moe",
        **EXPERTS,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    "qwen2 moe, with a shared expert": {"family": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 40},
    "mixtral": {"family": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "mixtral in stacks": {"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1, "in_stacks": True},
    "ministral": {"family": "ministral", "sliding_window": 4, "layer_types": MIXED},
}


def open_reference(folder: Path, _graphs: Path) -> ReferenceTargetEngine:
    checkpoint = read_target(str(folder))
    weights = ReferenceWeights(checkpoint.weights, "cpu")
    return ReferenceTargetEngine(checkpoint.spec, weights, taps=TAPS, norm_last_tap=False, limits=LIMITS)


ENGINES: dict[str, Callable[[Path, Path], TargetEngine]] = {
    "gqa": lambda folder, graphs: open_target(folder, graphs, taps=TAPS, limits=LIMITS),
    "standard": lambda folder, graphs: open_target(folder, graphs, taps=TAPS, limits=LIMITS, attention="standard"),
    "reference": open_reference,
}


def check(engine: TargetEngine, model: TransformersTarget, seed: int) -> None:
    """Ragged steps, with rejections, far beyond any of the windows."""
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=VOCAB_SIZE, seed=seed)
    for _ in range(6):
        step = rows.random_step(max_query=11)
        output = engine.forward(step.batch)
        logits, taps = expected_outputs(model, step, TAPS)
        np.testing.assert_allclose(output.logits, logits, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(output.taps, taps, atol=TOLERANCE, rtol=0)
        rows.commit(step, rows.random_acceptance(step))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_are_those_of_transformers_on_every_engine(case: str, tmp_path: Path) -> None:
    folder = write_by_transformers(tmp_path / "target", **CASES[case])
    model = TransformersTarget(folder)
    for seed, (name, opened) in enumerate(ENGINES.items()):
        check(opened(folder, tmp_path / name), model, seed)


@pytest.mark.parametrize("case", ["qwen2 with windows above a layer", "ministral", "qwen3 moe"])
def test_greedy_text_with_drafts_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    folder = write_by_transformers(tmp_path / "target", **CASES[case])
    prompts = [[5, 6, 7, 8, 9, 5, 6], [11], [3 * number % VOCAB_SIZE for number in range(20)]]
    found = greedy_with_drafts(folder, tmp_path, LIMITS, prompts, num_tokens=24)
    assert found == greedy_by_transformers(folder, prompts, num_tokens=24)


def test_a_llama_with_windows_is_a_ministral(tmp_path: Path) -> None:
    """transformers has no windows in its Llama; the tensors are the same."""
    folder = write_by_transformers(tmp_path / "target", **CASES["ministral"])
    model = TransformersTarget(folder)
    change_config(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    assert read_target(str(folder)).spec.family == "llama"
    check(ENGINES["gqa"](folder, tmp_path / "graphs"), model, 0)
