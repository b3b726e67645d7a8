"""GPTQ: integers packed along the inputs, zero points along the outputs, and for each input the group it is in.

    qweight [I * bits / 32, O] int32, qzeros [G, O * bits / 32] int32, scales [G, O], g_idx [I] int32 (may be absent)
    weight[o, i] = (integer[o, i] - zero[g(i), o]) * scale[g(i), o]

The first form of checkpoints (`gptq`, also where nothing is stated) stores a zero point less one, the second
(`gptq_v2`) as it is. Where the first stores the largest integer, loaders disagree about what zero point it means:
refused. Source: the packing code of AutoGPTQ and GPTQModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dspark_trt.checkpoints.checks import FLOAT_DTYPES
from dspark_trt.checkpoints.dequantising.packing import (
    WORD_BITS,
    Float32,
    derived,
    floats,
    mismatch,
    shape_of,
    unpacked,
)
from dspark_trt.checkpoints.derived import Derived
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore
from dspark_trt.errors import CheckpointError, abridged

NAME = "GPTQ"
_BITS = (2, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


class Settings(NamedTuple):
    """What quantization_config says."""

    bits: int
    group_size: int  # -1: all inputs are one group
    is_zero_less_one: bool  # as the first form of checkpoints stores zero points


def check(values: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for variants that are not implemented."""
    settings(values, where)
    stated = values.get("dynamic") or {}
    if not isinstance(stated, Mapping) or any(not str(key).startswith("-:") for key in stated):
        raise CheckpointError(
            f"{where}: quantization_config: dynamic gives some modules other bits, which is not supported for GPTQ; "
            "use the unquantised checkpoint"
        )


def settings(values: Mapping[str, Any], where: str) -> Settings:
    bits, group_size = values.get("bits"), values.get("group_size", 128)
    if type(bits) is not int or bits not in _BITS:
        raise CheckpointError(
            f"{where}: quantization_config: GPTQ weights of {abridged(bits)} bits are not supported (expected one of "
            f"{_BITS}); use the unquantised checkpoint"
        )
    if type(group_size) is not int or not (group_size == -1 or group_size > 0):
        raise CheckpointError(
            f"{where}: quantization_config: group_size = {abridged(group_size)}, expected a number of inputs or -1"
        )
    form = values.get("checkpoint_format") or values.get("format") or "gptq"
    if form not in _FORMATS:
        raise CheckpointError(
            f"{where}: quantization_config: GPTQ weights in checkpoint_format {abridged(form)} are not supported "
            f"(expected one of {_FORMATS}); use the unquantised checkpoint"
        )
    return Settings(bits, group_size, form == "gptq")


def weights_of(weights: SafetensorsStore, values: Mapping[str, Any], where: str) -> dict[str, Derived]:
    """Every weight with a `qweight`. Raises CheckpointError where its tensors do not fit together."""
    given = settings(values, where)
    found: dict[str, Derived] = {}
    for qweight in (name for name in weights.names() if name.endswith(".qweight")):
        module = qweight.removesuffix(".qweight")
        words, outputs = _two(shape_of(weights, qweight, ("I32",), where), qweight, where)
        inputs = words * WORD_BITS // given.bits
        size = inputs if given.group_size == -1 else given.group_size
        groups = -(-inputs // size)
        for name, dtypes, expected in (
            (f"{module}.qzeros", ("I32",), (groups, outputs * given.bits // WORD_BITS)),
            (f"{module}.scales", FLOAT_DTYPES, (groups, outputs)),
        ):
            if (shape := shape_of(weights, name, dtypes, where)) != expected:
                raise mismatch(name, shape, f"{list(expected)} with group_size {given.group_size}", where)
        parts = [qweight, f"{module}.qzeros", f"{module}.scales"]
        if weights.has(f"{module}.g_idx"):
            parts.append(f"{module}.g_idx")
            if (shape := shape_of(weights, parts[-1], ("I32", "I64"), where)) != (inputs,):
                raise mismatch(parts[-1], shape, f"[{inputs}]", where)
        make = partial(_weight, weights, module, given, size, len(parts) == 4, where)
        found |= derived(f"{module}.weight", (outputs, inputs), tuple(parts), make)
    return found


def _weight(weights: SafetensorsStore, module: str, given: Settings, size: int, has_index: bool, where: str) -> Float32:
    """[O, I]."""
    integers = unpacked(weights.stored(f"{module}.qweight").T, given.bits)  # [O, I]
    zeros = unpacked(weights.stored(f"{module}.qzeros"), given.bits)  # [G, O]
    scales = floats(weights, f"{module}.scales")
    groups = weights.stored(f"{module}.g_idx").astype(np.int64) if has_index else np.arange(integers.shape[1]) // size
    if groups.size and not 0 <= groups.min() <= groups.max() < len(scales):
        raise CheckpointError(
            f"{where}: tensor {module}.g_idx has groups from {groups.min()} to {groups.max()}, expected 0 to "
            f"{len(scales) - 1}; download the checkpoint again"
        )
    if given.is_zero_less_one:
        if int(zeros.max(initial=0)) == (1 << given.bits) - 1:
            raise CheckpointError(
                f"{where}: tensor {module}.qzeros has a zero point that loaders of checkpoint_format 'gptq' read "
                "differently (the largest integer, plus one); use a checkpoint in format 'gptq_v2', or the unquantised "
                "one"
            )
        zeros = zeros + np.uint8(1)
    weight: Float32 = (integers.astype(np.float32) - zeros.T[:, groups]) * scales.T[:, groups]
    return weight


def _two(shape: tuple[int, ...], name: str, where: str) -> tuple[int, int]:
    if len(shape) != 2:
        raise mismatch(name, shape, "a matrix", where)
    return shape[0], shape[1]
