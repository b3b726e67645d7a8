"""What the formats share: integers in words, scales over blocks, and a weight made of both.

Shape letters: `O` outputs and `I` inputs of a Linear layer, `G` groups of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.derived import Derived
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore
from dspark_trt.checkpoints.spec import TensorInfo
from dspark_trt.errors import CheckpointError

Float32 = NDArray[np.float32]
WORD_BITS = 32
FP8 = "F8_E4M3"
_FP8_VALUES: Float32 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def unpacked(words: NDArray[np.generic], bits: int) -> NDArray[np.uint8]:
    """[..., n] int32 -> [..., n * 32 / bits], the lowest bits first; `bits` divides 32."""
    shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    integers: NDArray[np.uint8] = ((unsigned[..., None] >> shifts) & ((1 << bits) - 1)).astype(np.uint8)
    return integers.reshape(*words.shape[:-1], -1)


def fp8_values(stored: NDArray[np.generic]) -> Float32:
    """float8 e4m3 -> float32, exactly."""
    values: Float32 = _FP8_VALUES[stored.view(np.uint8)]
    return values


def derived(
    name: str, shape: tuple[int, int], sources: tuple[str, ...], make: Callable[[], Float32]
) -> dict[str, Derived]:
    """One entry for the weight `name` [O, I]."""
    return {name: Derived(TensorInfo("float32", shape), sources, make)}


def floats(weights: SafetensorsStore, name: str) -> Float32:
    """A scale or a zero point, of any element type, in float32."""
    return weights.stored(name).astype(np.float32)


def shape_of(weights: SafetensorsStore, name: str, dtypes: tuple[str, ...], where: str) -> tuple[int, ...]:
    """Raises CheckpointError when that tensor is missing or of another element type."""
    if not weights.has(name):
        raise CheckpointError(
            f"{where}: tensor {name} is missing, without which the weight beside it cannot be read; download the "
            "checkpoint again"
        )
    info = weights.info(name)
    if info.dtype not in dtypes:
        raise CheckpointError(
            f"{where}: tensor {name} has element type {info.dtype}, expected {' or '.join(dtypes)}; the weights and "
            "quantization_config do not belong together"
        )
    return info.shape


def mismatch(name: str, found: tuple[int, ...], expected: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: tensor {name} has shape {list(found)}, expected {expected}; the weights and quantization_config do "
        "not belong together"
    )


def spread(
    scale: Float32, shape: tuple[int, int], block: tuple[int, int] | None, groups: NDArray[Any] | None = None
) -> Float32:
    """A scale of any of the kinds that `scale_kind` knows, to multiply a weight of that `shape` by."""
    kind = scale_kind(scale.shape, shape, block)
    assert kind is not None
    match kind:
        case "tensor":
            return scale.reshape(1, 1)
        case "channel":
            return scale.reshape(-1, 1)
        case "block":
            assert block is not None
            rows, columns = (np.arange(extent) // step for extent, step in zip(shape, block, strict=True))
            return scale[rows][:, columns]
    if groups is not None:
        return scale[:, groups]
    return np.repeat(scale, shape[1] // scale.shape[1], axis=1)


def scale_kind(scale: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int] | None) -> str | None:
    """One number, one for each output, for each block of both, or for each group of inputs; None: nothing of that."""
    outputs, inputs = shape
    if math.prod(scale) == 1:
        return "tensor"
    if scale in ((outputs,), (outputs, 1)):
        return "channel"
    if block is not None and scale == (-(-outputs // block[0]), -(-inputs // block[1])):
        return "block"
    is_grouped = len(scale) == 2 and scale[0] == outputs and scale[1] and inputs % scale[1] == 0
    return "group" if is_grouped else None
