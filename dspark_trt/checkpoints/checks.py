"""Checks of what has been read: sizes, token ids, and that a checkpoint has exactly the tensors of its layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import DecoderSpec, TargetSpec, WeightStore
from dspark_trt.errors import CheckpointError

FLOAT_DTYPES = ("float32", "float16", "bfloat16")

_CHUNK_ELEMENTS = 1 << 24
# Beyond any checkpoint, and far below what listing the tensors of a wrong configuration would take.
_MAX_LAYERS = 1024
_MAX_SIZE = 1 << 24
_SIZES = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")


def check_sizes(spec: DecoderSpec, where: str) -> None:
    """Raises CheckpointError for sizes that no model has, before anything is allocated for them."""
    limits = {"num_layers": _MAX_LAYERS, **dict.fromkeys(_SIZES, _MAX_SIZE)}
    for name, most in limits.items():
        _check_size(getattr(spec, name), name, most, where)
    for shape in {spec.shape_of(layer) for layer in range(spec.num_layers)}:
        _check_size(shape.num_kv_heads, "num_kv_heads", _MAX_SIZE, where)
        _check_size(shape.head_dim, "head_dim", _MAX_SIZE, where)
        rope = shape.rope
        numbers = {"rms_norm_eps": spec.rms_norm_eps, "rope theta": rope.theta, "rope factor": rope.factor or 1.0}
        for name, number in numbers.items():
            if not (math.isfinite(number) and number > 0):
                raise CheckpointError(
                    f"{where}: {name}: expected a positive number, found {number}; the file is damaged"
                )


def _check_size(found: int, name: str, most: int, where: str) -> None:
    if not 1 <= found <= most:
        raise CheckpointError(f"{where}: {name}: expected 1 to {most}, found {found}; the file is damaged")


def check_tensors(weights: WeightStore, expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Every expected tensor is there with its shape and a float element type, and there is no other one.

    Raises CheckpointError that names the tensor, what was expected and what was found.
    """
    found = weights.names()
    for name in expected:
        if name not in found:
            raise CheckpointError(
                f"{where}: tensor {name} is missing (expected shape {list(expected[name])}, one of "
                f"{len(expected)} tensors, found {len(found)}); download the checkpoint again or correct its "
                "config.json"
            )
    unexpected = [name for name in found if name not in expected]
    if unexpected:
        found_shape = list(weights.info(unexpected[0]).shape)
        more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
        raise CheckpointError(
            f"{where}: tensor {unexpected[0]} with shape {found_shape}{more} is not expected: config.json does not "
            "say what it is for, and leaving it out would change the output. Correct config.json, or use a checkpoint "
            "of a supported form"
        )
    for name, shape in expected.items():
        info = weights.info(name)
        if info.shape != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(info.shape)}, expected {list(shape)} from config.json; the "
                "weights and the configuration do not belong together"
            )
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{where}: tensor {name} has element type {info.dtype}, expected one of {', '.join(FLOAT_DTYPES)}; "
                "use the unquantised checkpoint"
            )


def check_token_ids(spec: TargetSpec, where: str) -> None:
    """Raises CheckpointError when an end token lies outside the vocabulary: no text would ever end by it."""
    for token in spec.eos_token_ids:
        if not 0 <= token < spec.decoder.vocab_size:
            raise CheckpointError(
                f"{where}: token id {token} (eos_token_id) is outside the vocabulary of "
                f"{spec.decoder.vocab_size}; correct the checkpoint's configuration"
            )


def check_finite(weights: WeightStore, where: str) -> None:
    """Reads every weight once. Raises CheckpointError that names the first tensor with NaN or infinite elements."""
    for name in weights.names():
        array = weights.array(name)
        num_bad = sum(int(np.count_nonzero(~_is_finite(chunk))) for chunk in _chunks(array))
        if num_bad:
            raise CheckpointError(
                f"{where}: tensor {name} has {num_bad} NaN or infinite elements out of {array.size}; download the "
                "checkpoint again, or use another one"
            )


def is_equal(left: NDArray[np.generic], right: NDArray[np.generic]) -> bool:
    """Whether two tensors hold the same numbers, whatever their element types; stops at the first difference."""
    if left.shape != right.shape:
        return False
    pairs = zip(_chunks(left), _chunks(right), strict=True)
    return all(np.array_equal(a.astype(np.float32), b.astype(np.float32)) for a, b in pairs)


def _chunks(array: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    """Views of at most about `_CHUNK_ELEMENTS` elements, so that a mapped file is never copied whole."""
    flat = array.reshape(-1)
    return [flat[start : start + _CHUNK_ELEMENTS] for start in range(0, flat.size, _CHUNK_ELEMENTS)]


def _is_finite(chunk: NDArray[np.generic]) -> NDArray[np.bool_]:
    """All exponent bits set means NaN or infinite; integer arithmetic, since numpy has no fast path for bfloat16."""
    exponent = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[chunk.dtype.name]
    bits: Any = chunk.view(f"u{chunk.dtype.itemsize}")
    finite: NDArray[np.bool_] = (bits & exponent) != exponent
    return finite
