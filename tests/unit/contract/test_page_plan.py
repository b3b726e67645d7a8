"""How many pages a GPU has room for, told from specifications alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dspark_trt.checkpoints.spec import BlockDrafterSpec, DecoderSpec, RopeSpec, TargetSpec
from dspark_trt.contract.dims import DrafterDims, TargetDims, drafter_dims, target_dims
from dspark_trt.contract.page_plan import PagePlan, most_pages, page_bytes, plan_pages
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import CapacityError

QWEN3_8B = DecoderSpec(
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope=RopeSpec(theta=1e6),
    max_position_embeddings=40960,
    has_qk_norm=True,
    has_qkv_bias=False,
    has_o_bias=False,
    has_mlp_bias=False,
)
DRAFTER = BlockDrafterSpec(
    decoder=replace(QWEN3_8B, num_layers=5),
    gamma=7,
    mask_token_id=151669,
    target_layer_ids=(1, 9, 17, 25, 33),
    markov_rank=256,
    markov_head_type="vanilla",
    has_confidence_head=True,
    has_confidence_bias=True,
    is_confidence_with_markov=True,
    has_own_embedding=False,
    has_own_head=False,
)
GPU_BYTES = 80 * 10**9
OTHER_BYTES = int(19.2e9) + (3 << 30)  # weights of both models, and everything that is no page


def dims(max_requests: int = 64, max_seq_len: int = 16384) -> tuple[TargetDims, DrafterDims]:
    limits = EngineLimits(max_requests, max_seq_len, 2048)
    target = TargetSpec(family="qwen3", decoder=QWEN3_8B, is_head_tied=False, eos_token_ids=(151645,))
    return (
        target_dims(target, num_taps=5, limits=limits, attention="paged", element_type="bfloat16"),
        drafter_dims(DRAFTER, limits=limits, attention="paged", element_type="bfloat16"),
    )


def plan(utilization: float = 0.9, **sizes: int) -> PagePlan:
    return plan_pages(*dims(**sizes), device_bytes=GPU_BYTES, utilization=utilization, other_bytes=OTHER_BYTES)


def test_64_requests_of_up_to_16384_positions_of_qwen3_8b_are_servable_on_80_gb() -> None:
    """Own rows would take 199 GB; of pages there are as many as fit, and the longest request fits 17 times."""
    target, drafter = dims()
    assert page_bytes(target, drafter) == 64 * (36 + 5) * 2 * 8 * 128 * 2
    assert most_pages(target, drafter) * page_bytes(target, drafter) > 170e9
    found = plan()
    assert found.max_requests == 64
    assert 0 < found.kv_bytes + OTHER_BYTES <= 0.9 * GPU_BYTES
    assert found.num_full_requests == 17
    assert found.num_pages * 64 // 64 > 4300, "positions for each of 64 requests"
    assert found.words == (
        "4612 pages of 64 positions, 49.57 GB: 17 of 64 requests fit with 16384 positions each, shorter ones in "
        "greater number"
    )


def test_there_are_never_more_pages_than_rows_can_fill() -> None:
    found = plan(max_requests=2, max_seq_len=1024)
    assert found.num_pages == 2 * 17 + 1, "1024 positions and a draft block"
    assert found.num_full_requests == 2


def test_less_memory_is_fewer_pages_and_less_than_one_request_is_refused() -> None:
    assert plan(0.5).num_pages < plan(0.9).num_pages
    with pytest.raises(
        CapacityError, match=r"16384 positions takes 2\.77 GB, and 0\.3 of 80\.0 GB .*--gpu-memory-utili"
    ):
        plan(0.3)


def test_a_drafter_whose_context_stands_in_rows_of_its_own_leaves_less() -> None:
    target, drafter = dims()
    rows = drafter_dims(DRAFTER, limits=target.limits, attention="standard", element_type="bfloat16")
    found = plan_pages(target, rows, device_bytes=GPU_BYTES, utilization=0.9, other_bytes=OTHER_BYTES)
    assert found.page_bytes < page_bytes(target, drafter)
    assert found.kv_bytes < plan().kv_bytes - 20e9
