"""Rotary tables equal those that transformers computes from the same configuration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dspark_trt.checkpoints.rope import RopeParameters, rope_spec
from dspark_trt.graphs.rope import inverse_frequencies, rope_tables

NUM_POSITIONS = 8192
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.9,
        "mscale_all_dim": 1.1,
        "beta_fast": 20,
        "beta_slow": 2,
    },
    "yarn not truncated": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_and_tables_equal_transformers(name: str, head_dim: int) -> None:
    parameters = RopeParameters(**ROPES[name])
    rope = rope_spec(parameters, theta=None, original=None, max_position_embeddings=NUM_POSITIONS, where="test")
    cos, sin = rope_tables(rope, head_dim=head_dim, num_positions=NUM_POSITIONS)

    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=NUM_POSITIONS,
        rope_parameters=ROPES[name],
    )
    rotary = LlamaRotaryEmbedding(config)
    np.testing.assert_allclose(inverse_frequencies(rope, head_dim), rotary.inv_freq.numpy(), rtol=1e-6)
    for table, wanted in zip((cos, sin), rotary(torch.zeros(1), torch.arange(NUM_POSITIONS)[None]), strict=True):
        half = wanted[0, :, : head_dim // 2].numpy()
        # two units in the last place of a frequency turn the last position by 8192 * 2**-23 radians
        bound = 2e-6 + np.arange(NUM_POSITIONS)[:, None] * 2.0**-23
        assert (np.abs(table - half) <= rotary.attention_scaling * bound).all()
