"""Cos and sin tables of rotary position embeddings. All scaling is in the tables, so that every attention form agrees.

Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071), section 3; Llama 3.1's smoothed scaling.

Frequencies and angles are rounded to float32, as transformers rounds them: at position 8000 exact angles would be off
by 5e-4 radians from those that the checkpoint's own code sees.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.rope import llama3_frequencies, plain_frequencies, proportional_frequencies
from dspark_trt.checkpoints.spec import RopeSpec

Float64 = NDArray[np.float64]


def rope_tables(
    rope: RopeSpec, *, head_dim: int, num_positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, [num_positions, head_dim / 2] each, multiplied by the attention factor where there is one."""
    frequencies = inverse_frequencies(rope, head_dim).astype(np.float32)
    angles = (np.arange(num_positions, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    factor = 1.0 if rope.attention_factor is None else rope.attention_factor
    return (factor * np.cos(angles)).astype(np.float32), (factor * np.sin(angles)).astype(np.float32)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Float64:
    """Radians per position of each rotated pair, [head_dim / 2]."""
    plain = plain_frequencies(rope.theta, head_dim)
    match rope.rope_type:
        case "default":
            return plain
        case "linear":
            assert rope.factor is not None
            return plain / rope.factor
        case "llama3":
            return llama3_frequencies(rope, plain)
        case "proportional":
            return proportional_frequencies(rope, plain)
        case "yarn":
            return _yarn(rope, plain, head_dim)


def _yarn(rope: RopeSpec, plain: Float64, head_dim: int) -> Float64:
    """Pairs that turn often over the original context stay, those that turn rarely are stretched,
    a ramp between them."""
    assert rope.factor is not None
    assert rope.beta_fast is not None
    assert rope.beta_slow is not None
    low = _pair_with_turns(rope, rope.beta_fast, head_dim)
    high = _pair_with_turns(rope, rope.beta_slow, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)
    stretch = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
    scaled: Float64 = (1 - stretch) * plain + stretch * plain / rope.factor
    return scaled


def _pair_with_turns(rope: RopeSpec, turns: float, head_dim: int) -> float:
    """The (fractional) index of the pair that makes `turns` full turns over the original context."""
    assert rope.original_max_position_embeddings is not None
    wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))
