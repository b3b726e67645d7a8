"""Rows of the caches begin where TensorRT takes an address, whatever limits a build has."""

from __future__ import annotations

import math

import pytest

from dspark_trt.checkpoints.spec import BlockDrafterSpec, DecoderSpec, RopeSpec, TargetSpec
from dspark_trt.contract.dims import drafter_dims, target_dims
from dspark_trt.contract.protocol import EngineLimits

ALIGNMENT_BYTES, ELEMENT_BYTES = 256, 2  # of an address (IExecutionContext::setTensorAddress), and of a number


def decoder(num_kv_heads: int, head_dim: int) -> DecoderSpec:
    return DecoderSpec(
        num_layers=2,
        hidden_size=96,
        intermediate_size=128,
        num_heads=2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=64,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=10000.0),
        max_position_embeddings=4096,
        has_qk_norm=False,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
    )


@pytest.mark.parametrize("max_seq_len", [1, 96, 1001, 2048])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 32), (3, 64), (5, 80), (8, 128)])
def test_every_row_of_standard_attention_begins_at_a_whole_address(
    num_kv_heads: int, head_dim: int, max_seq_len: int
) -> None:
    spec, limits = decoder(num_kv_heads, head_dim), EngineLimits(3, max_seq_len, 17)
    target = TargetSpec(family="llama", decoder=spec, is_head_tied=True, eos_token_ids=(2,))
    drafter = BlockDrafterSpec(
        decoder=spec,
        gamma=7,
        mask_token_id=3,
        target_layer_ids=(0, 1),
        markov_rank=4,
        markov_head_type="vanilla",
        has_confidence_head=True,
        has_confidence_bias=True,
        is_confidence_with_markov=True,
        has_own_embedding=False,
        has_own_head=False,
    )
    for dims in (
        target_dims(target, num_taps=2, limits=limits, attention="standard", element_type="bfloat16"),
        drafter_dims(drafter, limits=limits, attention="standard", element_type="bfloat16"),
    ):
        assert math.prod(dims.cache.row_shape_of(0)) * ELEMENT_BYTES % ALIGNMENT_BYTES == 0
        assert max_seq_len + 17 <= dims.cache.capacity < max_seq_len + 17 + 64
