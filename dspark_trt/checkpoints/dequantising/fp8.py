"""`quant_method: fp8`: weights in float8 e4m3, and a scale for each block of a matrix (DeepSeek's form) or for all.

A weight is its stored value times `weight_scale_inv`, whose name says otherwise. Source: FineGrainedFP8Config and
Fp8Dequantize of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from dspark_trt.checkpoints.checks import FLOAT_DTYPES
from dspark_trt.checkpoints.dequantising.packing import (
    FP8,
    Float32,
    derived,
    floats,
    fp8_values,
    mismatch,
    scale_kind,
    shape_of,
    spread,
)
from dspark_trt.checkpoints.derived import Derived
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore
from dspark_trt.errors import CheckpointError, abridged

NAME = "block-scaled FP8"
OF_ACTIVATIONS = (".activation_scale", ".input_scale")
_SCALE = "_scale_inv"


def check(values: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for variants that are not implemented."""
    for key, accepted in (("fmt", ("e4m3", None)), ("scale_fmt", ("float", None)), ("expert_dtype", ("fp8", None))):
        if values.get(key) not in accepted:
            raise CheckpointError(
                f"{where}: quantization_config: FP8 weights with {key} = {abridged(values[key])} are not supported "
                f"(expected {accepted[0]!r}); use the unquantised checkpoint"
            )
    block_of(values, where)


def block_of(values: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """None: one scale for a whole matrix."""
    block = values.get("weight_block_size", [128, 128])
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(each) is not int or each < 1 for each in block):
        raise CheckpointError(
            f"{where}: quantization_config: weight_block_size = {abridged(block)}, expected two numbers or null; take "
            "it from the published configuration"
        )
    return block[0], block[1]


def weights_of(weights: SafetensorsStore, values: Mapping[str, Any], where: str) -> dict[str, Derived]:
    """Every weight with a scale. Raises CheckpointError where the two do not fit together."""
    block = block_of(values, where)
    found: dict[str, Derived] = {}
    for scale in (name for name in weights.names() if name.endswith(f".weight{_SCALE}")):
        name = scale.removesuffix(_SCALE)
        shape, kind = shape_of(weights, name, (FP8,), where), shape_of(weights, scale, FLOAT_DTYPES, where)
        if len(shape) != 2 or scale_kind(kind, (shape[0], shape[1]), block) not in ("tensor", "block"):
            raise mismatch(scale, kind, f"one scale or one for each block of {block} of {list(shape)}", where)
        matrix = (shape[0], shape[1])
        found |= derived(name, matrix, (name, scale), partial(_weight, weights, name, scale, matrix, block))
    return found


def _weight(
    weights: SafetensorsStore, name: str, scale: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> Float32:
    return fp8_values(weights.stored(name)) * spread(floats(weights, scale), shape, block)
