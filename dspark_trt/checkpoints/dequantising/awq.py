"""AWQ, the form `gemm`: four bits packed along the outputs, eight of them a word in an order of their own.

    qweight [I, O / 8] int32, qzeros [G, O / 8] int32, scales [G, O]
    weight[o, i] = (integer[o, i] - zero[g(i), o]) * scale[g(i), o]

Nibble n of a word, from the lowest, holds output ORDER[n] of its eight; zero points are packed the same way and stored
as they are. Source: the packing code of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.checks import FLOAT_DTYPES
from dspark_trt.checkpoints.dequantising.packing import Float32, derived, floats, mismatch, shape_of, unpacked
from dspark_trt.checkpoints.derived import Derived
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore
from dspark_trt.errors import CheckpointError, abridged

NAME = "AWQ"
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLES = np.argsort(_ORDER)  # where each of eight outputs stands
_BITS = 4


def check(values: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for variants that are not implemented."""
    bits, version = values.get("bits", values.get("w_bit")), values.get("version", "gemm")
    zero_point = values.get("zero_point", True)
    if bits != _BITS or str(version).lower() != "gemm" or zero_point is not True:
        raise CheckpointError(
            f"{where}: quantization_config: AWQ weights with bits {abridged(bits)}, version {abridged(version)}, "
            f"zero_point {abridged(zero_point)} are not supported (expected 4, 'gemm', true); use the unquantised "
            "checkpoint"
        )


def weights_of(weights: SafetensorsStore, values: Mapping[str, Any], where: str) -> dict[str, Derived]:
    """Every weight with a `qweight`. Raises CheckpointError where its tensors do not fit together."""
    group_size = values.get("group_size", values.get("q_group_size", 128))
    found: dict[str, Derived] = {}
    for qweight in (name for name in weights.names() if name.endswith(".qweight")):
        module = qweight.removesuffix(".qweight")
        shape = shape_of(weights, qweight, ("I32",), where)
        if len(shape) != 2:
            raise mismatch(qweight, shape, "a matrix", where)
        inputs, outputs = shape[0], shape[1] * 8
        size = inputs if group_size == -1 else group_size
        if type(size) is not int or size < 1 or inputs % size:
            raise mismatch(qweight, shape, f"a multiple of group_size = {abridged(group_size)} rows", where)
        for name, dtypes, expected in (
            (f"{module}.qzeros", ("I32",), (inputs // size, shape[1])),
            (f"{module}.scales", FLOAT_DTYPES, (inputs // size, outputs)),
        ):
            if (other := shape_of(weights, name, dtypes, where)) != expected:
                raise mismatch(name, other, f"{list(expected)} with group_size {size}", where)
        sources = (qweight, f"{module}.qzeros", f"{module}.scales")
        found |= derived(f"{module}.weight", (outputs, inputs), sources, partial(_weight, weights, module, size))
    return found


def _weight(weights: SafetensorsStore, module: str, size: int) -> Float32:
    """[O, I]."""
    integers, zeros = (_ordered(weights.stored(f"{module}.{which}")) for which in ("qweight", "qzeros"))
    scales = floats(weights, f"{module}.scales")
    groups = np.arange(len(integers)) // size
    weight: Float32 = ((integers.astype(np.float32) - zeros[groups]) * scales[groups]).T
    return np.ascontiguousarray(weight)


def _ordered(words: NDArray[np.generic]) -> NDArray[np.uint8]:
    """[n, O / 8] -> [n, O]."""
    nibbles = unpacked(words, _BITS).reshape(len(words), -1, 8)
    return nibbles[:, :, _NIBBLES].reshape(len(words), -1)
