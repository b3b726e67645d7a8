"""Block quantisation of Linear weights for `com.microsoft.MatMulNBits` (opt-in precisions int8 and int4).

A row of a weight [out, in] is cut into blocks of 32 along `in`; each block has one float32 scale and integers around a
zero point of 2^(bits-1). Activations are quantised to eight bits per block while the graph runs (accuracy level 4).

What is quantised: the Linear layers of the decoder stack. `int8`: all in eight bits. `int4`: the target's layers in
four bits, the output head and the drafter in eight, because a wrong logit costs more than the bytes saved and a drafter
pays for coarse weights with acceptance. What never is: the embedding (a step reads a few of its rows), norms, biases,
the drafter's `fc` (raw residual streams have outliers that eight-bit activations cannot hold), Markov head and
confidence head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.precision import Precision

BLOCK_SIZE = 32
ACCURACY_LEVEL = 4  # int8 activations

_ROWS_PER_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class LinearBits:
    """Bits of the weights of each kind of Linear layer; None: not quantised."""

    target_layers: int | None
    drafter_layers: int | None
    head: int | None


def linear_bits(precision: Precision) -> LinearBits:
    match precision:
        case "fp32" | "bf16" | "fp16":
            return LinearBits(None, None, None)
        case "int8":
            return LinearBits(8, 8, 8)
        case "int4":
            return LinearBits(4, 8, 8)


def block_names(name: str, bits: int) -> tuple[str, str]:
    """Names of the quantised blocks and of their scales."""
    return f"{name}.int{bits}", f"{name}.int{bits}_scales"


def quantize_blocks(weight: NDArray[np.generic], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantise a weight [out, in].

    Returns blocks [out, num_blocks, BLOCK_SIZE * bits / 8] uint8 (four bits: two values a byte, the first in the low
    half) and scales [out, num_blocks] float32. The last block is padded with zeros.
    """
    rows, columns = weight.shape
    num_blocks = -(-columns // BLOCK_SIZE)
    blocks = np.empty((rows, num_blocks, BLOCK_SIZE * bits // 8), np.uint8)
    scales = np.empty((rows, num_blocks), np.float32)
    for start in range(0, rows, _ROWS_PER_CHUNK):
        part = slice(start, start + _ROWS_PER_CHUNK)
        padded = np.zeros((len(weight[part]), num_blocks * BLOCK_SIZE), np.float32)
        padded[:, :columns] = weight[part]
        blocks[part], scales[part] = _quantize(padded.reshape(-1, num_blocks, BLOCK_SIZE), bits)
    return blocks, scales


def _quantize(values: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The element of the largest magnitude becomes the integer -2^(bits-1),
    the end of the range that has one more step."""
    zero_point = 1 << (bits - 1)
    at = np.abs(values).argmax(axis=-1, keepdims=True)
    scales = np.take_along_axis(values, at, axis=-1) / np.float32(-zero_point)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    integers = np.clip(np.rint(values * inverse) + zero_point, 0, 2 * zero_point - 1).astype(np.uint8)
    if bits == 4:
        integers = integers[..., ::2] | integers[..., 1::2] << 4
    return integers, scales[..., 0].astype(np.float32, copy=False)
