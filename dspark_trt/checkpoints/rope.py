"""Rotary position embedding: both styles of config.json become one RopeSpec.

Source: transformers' modelling code, which defines the format. Version 5 has `rope_parameters` with `rope_theta` in it;
version 4 has `rope_theta` at the top level and `rope_scaling`, whose type stands under `rope_type` or `type`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, PositiveFloat, PositiveInt

from dspark_trt.checkpoints.spec import RopeSpec
from dspark_trt.errors import CheckpointError

DEFAULT_THETA = 10000.0  # what the format says when no rope_theta is written
Float64 = NDArray[np.float64]
_SUPPORTED = ("default", "linear", "llama3", "yarn", "proportional")


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[PositiveInt, BeforeValidator(_whole)]  # some files say 32768.0


class RopeParameters(BaseModel):
    """One dictionary of rope parameters. An unknown key could change the frequencies, so it is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFloat | None = None
    factor: PositiveFloat | None = None
    original_max_position_embeddings: WholeNumber | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    partial_rotary_factor: float | None = None


def rope_spec(
    parameters: RopeParameters,
    *,
    theta: float | None,
    original: int | None,
    max_position_embeddings: int,
    where: str,
    default_theta: float = DEFAULT_THETA,
) -> RopeSpec:
    """Resolve one dictionary of parameters, with the top-level `rope_theta` and `original_max_position_embeddings`.

    Defaults that the format defines are filled in (for yarn also `attention_factor`), so that nobody derives them
    twice.
    Raises CheckpointError for a type that is not implemented and for missing or contradicting parameters.
    """
    rope_type = parameters.rope_type or parameters.type or "default"
    if parameters.type and parameters.type != rope_type:
        raise CheckpointError(
            f"{where}: rope_type is {rope_type!r}, but type is {parameters.type!r}; remove one of them"
        )
    if rope_type != "proportional" and parameters.partial_rotary_factor not in (None, 1):
        raise CheckpointError(
            f"{where}: partial_rotary_factor = {parameters.partial_rotary_factor} is not implemented (expected 1 or "
            "absent); use a checkpoint that rotates the whole head"
        )
    if theta and parameters.rope_theta and theta != parameters.rope_theta:
        raise CheckpointError(
            f"{where}: rope_theta is {theta} at the top level, but {parameters.rope_theta} in the rope parameters; "
            "remove the wrong one"
        )
    theta = float(parameters.rope_theta or theta or default_theta)
    original = original or parameters.original_max_position_embeddings or max_position_embeddings
    match rope_type:
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, "linear", factor=_required(parameters, "factor", where))
        case "llama3":
            return RopeSpec(
                theta,
                "llama3",
                factor=_required(parameters, "factor", where),
                original_max_position_embeddings=original,
                low_freq_factor=_required(parameters, "low_freq_factor", where),
                high_freq_factor=_required(parameters, "high_freq_factor", where),
            )
        case "proportional":
            return RopeSpec(
                theta,
                "proportional",
                factor=float(parameters.factor or 1),
                partial_rotary_factor=_share(parameters.partial_rotary_factor, where),
            )
        case "yarn":
            factor = float(parameters.factor or max_position_embeddings / original)
            return RopeSpec(
                theta,
                "yarn",
                factor=factor,
                original_max_position_embeddings=original,
                beta_fast=float(parameters.beta_fast or 32),
                beta_slow=float(parameters.beta_slow or 1),
                attention_factor=_yarn_attention_factor(parameters, factor),
                mscale=parameters.mscale,
                mscale_all_dim=parameters.mscale_all_dim,
                truncate=parameters.truncate is not False,
            )
    raise CheckpointError(
        f"{where}: rope type {rope_type!r} is not implemented; expected one of {', '.join(_SUPPORTED)}. "
        "Use a checkpoint without it, or one whose configuration leaves this scaling out"
    )


def reach(rope: RopeSpec, max_position_embeddings: int) -> int:
    """Positions that a model is made for. With yarn `max_position_embeddings` may have been left as it was before."""
    if rope.rope_type != "yarn":
        return max_position_embeddings
    assert rope.factor is not None
    assert rope.original_max_position_embeddings is not None
    return max(max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))


def plain_frequencies(theta: float, head_dim: int) -> Float64:
    """Radians per position of each rotated pair, unscaled, [head_dim / 2]. Source: RoFormer (arXiv 2104.09864)."""
    frequencies: Float64 = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return frequencies


def llama3_frequencies(rope: RopeSpec, plain: Float64) -> Float64:
    """Short wavelengths stay, long ones are stretched by `factor`, those between are blended.

    Source: Llama 3.1's scaling.
    """
    assert rope.factor is not None
    assert rope.original_max_position_embeddings is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)  # over the original context
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    frequencies: Float64 = keep * plain + (1 - keep) * plain / rope.factor
    return frequencies


def proportional_frequencies(rope: RopeSpec, plain: Float64) -> Float64:
    """The fastest pairs turn as they would in a head that turns as a whole, the others not at all.

    Source: transformers' proportional rope, which Gemma 4 has in its full layers.
    """
    assert rope.factor is not None
    assert rope.partial_rotary_factor is not None
    num_turning = int(rope.partial_rotary_factor * (2 * len(plain)) // 2)
    return np.where(np.arange(len(plain)) < num_turning, plain / rope.factor, 0.0)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Scale of cos and sin that yarn asks for. Source: YaRN (arXiv 2309.00071), section 3.4."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(parameters: RopeParameters, factor: float) -> float:
    if parameters.attention_factor is not None:
        return float(parameters.attention_factor)
    if parameters.mscale and parameters.mscale_all_dim:
        return yarn_mscale(factor, parameters.mscale) / yarn_mscale(factor, parameters.mscale_all_dim)
    return yarn_mscale(factor)


def _share(value: float | None, where: str) -> float:
    if value is None:
        return 1.0
    if not 0 <= value <= 1:
        raise CheckpointError(f"{where}: partial_rotary_factor: expected a share from 0 to 1, found {value}")
    return float(value)


def _required(parameters: RopeParameters, key: str, where: str) -> float:
    value: Any = getattr(parameters, key)
    if value is None:
        raise CheckpointError(f"{where}: rope type {parameters.rope_type or parameters.type!r} needs {key}; add it")
    return float(value)
