"""compressed-tensors: float8 or int8 weights with scales by tensor, output, block or group, and packed integers.

    weight float8 e4m3 or int8 [O, I], weight_scale, weight_zero_point (int8, where it is not symmetric)
    weight_packed int32 [O, I * bits / 32], weight_scale [O, G] or [O, 1], weight_shape [2],
    weight_zero_point int32 [O * bits / 32, G], weight_g_idx [I] (older files)
    weight = (integer - zero point) * scale

Packed integers lie along the inputs, the lowest bits first, and zero points along the outputs; both are stored with
2^(bits - 1) added. Source: the package's own compressors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from dspark_trt.checkpoints.checks import FLOAT_DTYPES
from dspark_trt.checkpoints.dequantising.packing import (
    FP8,
    WORD_BITS,
    Float32,
    derived,
    floats,
    fp8_values,
    mismatch,
    scale_kind,
    shape_of,
    spread,
    unpacked,
)
from dspark_trt.checkpoints.derived import Derived
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore
from dspark_trt.errors import CheckpointError, abridged

NAME = "compressed-tensors"
_OF = ("input", "output", "q", "k", "v")
OF_ACTIVATIONS = tuple(f".{which}_{what}" for which in _OF for what in ("scale", "zero_point"))
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision", "dense")
_PACKED_BITS = (4, 8)
_USE = "use the unquantised checkpoint"
Block = tuple[int, int] | None


def check(values: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for variants that are not implemented."""
    sparsity = values.get("sparsity_config") or {}
    stated = [values.get("format"), *(group.get("format") for group in _groups(values, where))]
    if isinstance(sparsity, Mapping):
        stated.append(sparsity.get("format"))
    for form in stated:
        if form is not None and form not in _FORMATS:
            raise CheckpointError(
                f"{where}: quantization_config: compressed-tensors weights in format {abridged(form)} are not "
                f"supported (expected one of {', '.join(_FORMATS)}); {_USE}"
            )
    if values.get("transform_config"):
        raise CheckpointError(
            f"{where}: quantization_config: transform_config rotates activations, which is not supported; {_USE}"
        )
    if values.get("quantization_status") not in (None, "compressed"):
        raise CheckpointError(
            f"{where}: quantization_config: quantization_status is {abridged(values['quantization_status'])}, expected "
            f"'compressed'; {_USE}"
        )
    _block(values, where)


def weights_of(weights: SafetensorsStore, values: Mapping[str, Any], where: str) -> dict[str, Derived]:
    """Every weight with a scale. Raises CheckpointError where its tensors do not fit together."""
    block = _block(values, where)
    found: dict[str, Derived] = {}
    for scale in (name for name in weights.names() if name.endswith(".weight_scale")):
        module = scale.removesuffix(".weight_scale")
        if weights.has(f"{module}.weight_packed"):
            found |= _packed(weights, module, where)
        else:
            found |= _whole(weights, module, block, where)
    return found


def _groups(values: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Named schemes (lists of targets) say nothing that the tensors do not."""
    groups = values.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise CheckpointError(f"{where}: quantization_config: config_groups: expected an object; download it again")
    return [group for group in groups.values() if isinstance(group, Mapping)]


def _block(values: Mapping[str, Any], where: str) -> Block:
    """Of the weights that have a scale for each block."""
    of_groups = [weights for group in _groups(values, where) if isinstance(weights := group.get("weights"), Mapping)]
    stated = [weights["block_structure"] for weights in of_groups if weights.get("block_structure") is not None]
    if not stated:
        return None
    first = stated[0]
    is_pair = isinstance(first, list) and len(first) == 2 and all(type(each) is int and each > 0 for each in first)
    if not is_pair or any(each != first for each in stated):
        raise CheckpointError(
            f"{where}: quantization_config: block_structure: expected one pair of numbers, found {abridged(stated)}; "
            f"{_USE}"
        )
    return first[0], first[1]


def _whole(weights: SafetensorsStore, module: str, block: Block, where: str) -> dict[str, Derived]:
    name, scale, zero = (f"{module}.weight{end}" for end in ("", "_scale", "_zero_point"))
    found = shape_of(weights, name, (FP8, "I8"), where)
    shape = _matrix(name, found, where)
    sources = [name, scale]
    _check_scale(weights, scale, shape, block, where)
    if weights.has(zero):
        sources.append(zero)
        _check_scale(weights, zero, shape, block, where, ("I8", *FLOAT_DTYPES))
    make = partial(_whole_weight, weights, name, shape, block, len(sources) == 3)
    return derived(name, shape, tuple(sources), make)


def _whole_weight(
    weights: SafetensorsStore, name: str, shape: tuple[int, int], block: Block, has_zero: bool
) -> Float32:
    stored = weights.stored(name)
    values = fp8_values(stored) if weights.info(name).dtype == FP8 else stored.astype(np.float32)
    if has_zero:
        values = values - spread(floats(weights, f"{name}_zero_point"), shape, block)
    return values * spread(floats(weights, f"{name}_scale"), shape, block)


def _packed(weights: SafetensorsStore, module: str, where: str) -> dict[str, Derived]:
    packed, scale, sizes, zero, index = (
        f"{module}.weight_{end}" for end in ("packed", "scale", "shape", "zero_point", "g_idx")
    )
    words = _matrix(packed, shape_of(weights, packed, ("I32",), where), where)
    if shape_of(weights, sizes, ("I64", "I32"), where) != (2,):
        raise mismatch(sizes, weights.info(sizes).shape, "[2]", where)
    outputs, inputs = (int(each) for each in weights.stored(sizes))
    bits = next((bits for bits in _PACKED_BITS if words == (outputs, -(-inputs * bits // WORD_BITS))), None)
    if bits is None:
        expected = f"[{outputs}, {inputs} * bits / 32] of 4 or 8 bits, from {sizes}"
        raise mismatch(packed, words, expected, where)
    shape = (outputs, inputs)
    _check_scale(weights, scale, shape, None, where)
    sources = [packed, scale, sizes]
    if weights.has(zero):
        sources.append(zero)
        groups = weights.info(scale).shape[-1]
        found, expected_shape = shape_of(weights, zero, ("I32",), where), (-(-outputs * bits // WORD_BITS), groups)
        if found != expected_shape:
            raise mismatch(zero, found, str(list(expected_shape)), where)
    if weights.has(index):
        sources.append(index)
        if (found := shape_of(weights, index, ("I32", "I64"), where)) != (inputs,):
            raise mismatch(index, found, f"[{inputs}]", where)
    make = partial(_packed_weight, weights, module, shape, bits, zero in sources, index in sources, where)
    return derived(f"{module}.weight", shape, tuple(sources), make)


def _packed_weight(
    weights: SafetensorsStore,
    module: str,
    shape: tuple[int, int],
    bits: int,
    has_zero: bool,
    has_index: bool,
    where: str,
) -> Float32:
    offset = 1 << (bits - 1)
    values = unpacked(weights.stored(f"{module}.weight_packed"), bits)[:, : shape[1]].astype(np.float32)
    scale = floats(weights, f"{module}.weight_scale")
    groups = weights.stored(f"{module}.weight_g_idx").astype(np.int64) if has_index else None
    if groups is not None and not 0 <= groups.min(initial=0) <= groups.max(initial=0) < scale.shape[-1]:
        raise CheckpointError(
            f"{where}: tensor {module}.weight_g_idx has a group beyond the {scale.shape[-1]} of the scales; download "
            "the checkpoint again"
        )
    zeros = np.full_like(scale, offset)
    if has_zero:
        zeros = unpacked(weights.stored(f"{module}.weight_zero_point").T, bits)[:, : shape[0]].T.astype(np.float32)
    return (values - spread(zeros, shape, None, groups)) * spread(scale, shape, None, groups)


def _check_scale(
    weights: SafetensorsStore,
    name: str,
    shape: tuple[int, int],
    block: Block,
    where: str,
    dtypes: tuple[str, ...] = FLOAT_DTYPES,
) -> None:
    found = shape_of(weights, name, dtypes, where)
    if scale_kind(found, shape, block) is None:
        raise mismatch(name, found, f"one scale, or one for each output, block or group of {list(shape)}", where)


def _matrix(name: str, shape: tuple[int, ...], where: str) -> tuple[int, int]:
    if len(shape) != 2:
        raise mismatch(name, shape, "a matrix", where)
    return shape[0], shape[1]
