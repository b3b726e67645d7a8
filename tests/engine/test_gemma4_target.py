"""Gemma 4 on ONNX Runtime against transformers: logits and taps over ragged steps with rejections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.dims import Attention
from dspark_trt.contract.protocol import EngineLimits, TargetEngine
from dspark_trt.reference.engines import ReferenceTargetEngine
from dspark_trt.reference.weights import ReferenceWeights
from tests.support.conversations import Conversations, TransformersTarget, expected_outputs, open_target
from tests.support.gemma4 import write_gemma_target

LIMITS = EngineLimits(max_requests=5, max_seq_len=128, max_batch_tokens=64)
TOLERANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "12B form": {},
    "values of their own": {"attention_k_eq_v": False},
    "text of the first form, biases, no cap": {
        "model_type": "gemma4_text",
        "attention_bias": True,
        "final_logit_softcapping": None,
    },
    "full layers alone, untied": {"layer_types": ["full_attention"] * 4, "tie_word_embeddings": False},
    "a window of one position": {"sliding_window": 1},
    "whole heads turn": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "factor": 2.0},
        }
    },
    "head_dim 12, which falls back": {"head_dim": 12},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_transformers_over_ragged_steps_with_rejections(case: str, tmp_path: Path) -> None:
    """On ONNX Runtime, and in the PyTorch oracle."""
    folder = write_gemma_target(tmp_path / "target", **CASES[case])
    taps = (-1, 0, 2, 3)
    target = read_target(str(folder))
    weights = ReferenceWeights(target.weights, "cpu")
    engines: tuple[TargetEngine, ...] = (
        open_target(target, tmp_path / "graphs", taps=taps, limits=LIMITS),
        ReferenceTargetEngine(target.spec, weights, taps=taps, norm_last_tap=False, limits=LIMITS),
    )
    model = TransformersTarget(folder)
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97, seed=sum(case.encode()))
    for _ in range(6):
        step = rows.random_step(max_query=9)
        logits, tap_values = expected_outputs(model, step, taps)
        for engine in engines:
            output = engine.forward(step.batch)
            np.testing.assert_allclose(output.logits, logits, atol=TOLERANCE, rtol=0)
            np.testing.assert_allclose(output.taps, tap_values, atol=TOLERANCE, rtol=0)
        rows.commit(step, rows.random_acceptance(step))


@pytest.mark.parametrize("attention", ["gqa", "standard"])
def test_long_rows_moved_rows_and_the_last_tap_behind_the_norm(attention: Attention, tmp_path: Path) -> None:
    """Rows of many windows, filled in chunks beside a row that decodes, then moved: caches have a shape per layer."""
    folder = write_gemma_target(tmp_path / "target")
    engine = open_target(
        folder, tmp_path / "graphs", taps=(-1, 1, 3), norm_last_tap=True, limits=LIMITS, attention=attention
    )
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    for chunk in (40, 30, 7):
        step = rows.step([4, 2], [3, chunk], num_decode=1)
        engine.forward(step.batch)
        rows.commit(step, [2, chunk])
    engine.move_row(2, 0, 77)
    rows.tokens[0], rows.tokens[2] = rows.tokens[2], []
    step = rows.step([0, 4], [5, 2], num_decode=2)
    output = engine.forward(step.batch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for index, (_, sequence) in enumerate(step.segments):
        with torch.no_grad():
            expected = model(torch.tensor([sequence]), output_hidden_states=True)
        part = slice(0, 5) if index == 0 else slice(5, 7)
        length = part.stop - part.start
        taps = np.concatenate([expected.hidden_states[layer + 1][0].numpy() for layer in (-1, 1, 3)], axis=1)
        np.testing.assert_allclose(output.logits[part], expected.logits[0][-length:], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(output.taps[part], taps[-length:], atol=TOLERANCE, rtol=0)
