"""Gemma 4 on ONNX Runtime against transformers: logits and taps over ragged steps with rejections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.contract.protocol import EngineLimits
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
    folder = write_gemma_target(tmp_path / "target", **CASES[case])
    taps = (-1, 0, 2, 3)
    engine = open_target(folder, tmp_path / "graphs", taps=taps, limits=LIMITS)
    model = TransformersTarget(folder)
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97, seed=sum(case.encode()))
    for _ in range(6):
        step = rows.random_step(max_query=9)
        output = engine.forward(step.batch)
        logits, tap_values = expected_outputs(model, step, taps)
        np.testing.assert_allclose(output.logits, logits, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(output.taps, tap_values, atol=TOLERANCE, rtol=0)
        rows.commit(step, rows.random_acceptance(step))
