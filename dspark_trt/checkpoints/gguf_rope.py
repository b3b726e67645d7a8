"""Rotary position embedding of a GGUF file: scaling keys, or one divisor for each frequency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark_trt.checkpoints.gguf_store import ROPE_FREQUENCIES
from dspark_trt.checkpoints.rope import llama3_frequencies, plain_frequencies, yarn_mscale
from dspark_trt.checkpoints.spec import DecoderSpec, RopeSpec
from dspark_trt.errors import CheckpointError

Getter = Callable[[str], Any]  # of a hyperparameter by its key, without the architecture's name
_LLAMA3_ORIGINAL_CONTEXT = 8192  # of every published llama3-scaled model; verified against the stored frequencies
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


def gguf_rope(get: Getter, context: int, path: Path) -> RopeSpec:
    """What the scaling keys say; `context` is the file's. Raises CheckpointError for a scaling not implemented."""
    theta = float(get("rope.freq_base") or 10000.0)
    factor = get("rope.scaling.factor") or get("rope.scale_linear")
    match get("rope.scaling.type") or ("linear" if get("rope.scale_linear") else "none"):
        case "none":
            return RopeSpec(theta)
        case "linear" if factor:
            return RopeSpec(theta, "linear", factor=float(factor))
        case "yarn" if factor:
            return RopeSpec(
                theta,
                "yarn",
                factor=float(factor),
                original_max_position_embeddings=get("rope.scaling.original_context_length") or context,
                beta_fast=float(get("rope.scaling.yarn_beta_fast") or 32),
                beta_slow=float(get("rope.scaling.yarn_beta_slow") or 1),
                # llama.cpp multiplies the factor that yarn defines, Hugging Face's attention_factor replaces it
                attention_factor=float(get("rope.scaling.attn_factor") or 1.0) * yarn_mscale(float(factor)),
            )
        case rope_type:
            raise CheckpointError(
                f"{path}: rope scaling {rope_type!r} with factor {factor} is not implemented; expected none, linear "
                "or yarn with a factor"
            )


def with_rope_factors(decoder: DecoderSpec, factors: Any, get: Getter, path: Path) -> DecoderSpec:
    """The file holds one divisor per frequency instead of the llama3 parameters:
    find these, and prove that they fit."""
    if np.all(factors == 1):
        return decoder
    factor = float(np.max(factors))
    original = get("rope.scaling.original_context_length") or _LLAMA3_ORIGINAL_CONTEXT
    rope = RopeSpec(
        decoder.rope.theta,
        "llama3",
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
    )
    plain = plain_frequencies(rope.theta, decoder.head_dim)
    expected = plain / llama3_frequencies(rope, plain)
    if (
        decoder.rope.rope_type != "default"
        or factors.shape != expected.shape
        or not np.allclose(factors, expected, 1e-4)
    ):
        raise CheckpointError(
            f"{path}: the frequencies of {ROPE_FREQUENCIES} are not those of llama3 scaling with factor {factor}, "
            f"original context {original}, low {_LLAMA3_LOW} and high {_LLAMA3_HIGH}; use the model's Hugging Face "
            "checkpoint"
        )
    return replace(decoder, rope=rope)
