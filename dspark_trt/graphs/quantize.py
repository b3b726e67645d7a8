"""Quantised weights of Linear layers on ONNX Runtime (opt-in precisions int8 and int4).

`int8`, by rows: eight bits and one scale for each output of a weight [out, in]; activations get one scale for each row
while the graph runs (see linears.py). The sums are of integers, exact in any order, so a row of the product depends on
that row alone, bit for bit. The target's layers and head; the drafter's where its own precision is int8.

`int4`, by blocks, for `com.microsoft.MatMulNBits`: a row of a weight is cut into blocks of 32 along `in`; each block
has one float32 scale and integers around a zero point of 2^(bits-1). Activations are quantised to eight bits per block
while the graph runs (accuracy level 4). The target's layers in four bits, the output head and the drafter in eight,
because a wrong logit costs more than the bytes saved and a drafter pays for coarse weights with acceptance.

What never is: the embedding (a step reads a few of its rows), norms, biases, the drafter's `fc` (raw residual streams
have outliers that eight-bit activations cannot hold), Markov head and confidence head. Experts of a mixture are of
blocks at either precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.drafter_form import DrafterPrecision
from dspark_trt.contract.precision import Precision
from dspark_trt.machine import cpu

BLOCK_SIZE = 32
ACCURACY_LEVEL = 4  # int8 activations

_ROWS_PER_CHUNK = 4096


LinearBits = Literal[4, 8, "rows"] | None  # None: not quantised; "rows": eight bits a row, see quantize_rows


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the weights of each kind of Linear layer are written."""

    target_layers: LinearBits
    drafter_layers: LinearBits
    head: LinearBits
    drafter_head: LinearBits


def quantisation(precision: Precision, drafter: DrafterPrecision = "fp32") -> Quantisation:
    """`drafter` is the drafter's own precision where the target is of float32 or int8."""
    own: LinearBits = "rows" if drafter == "int8" else None
    match precision:
        case "fp32":
            return Quantisation(None, own, None, own)
        case "int8":
            return Quantisation("rows", own, "rows", own)
        case "bf16" | "fp16":
            return Quantisation(None, None, None, None)
        case "int4":
            return Quantisation(4, 8, 8, 8)


def block_names(name: str, bits: int) -> tuple[str, str]:
    """Names of the quantised blocks and of their scales."""
    return f"{name}.int{bits}", f"{name}.int{bits}_scales"


def quantize_blocks(weight: NDArray[np.generic], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantise a weight [out, in].

    Returns blocks [out, num_blocks, BLOCK_SIZE * bits / 8] uint8 (four bits: two values a byte, the first in the low
    half) and scales [out, num_blocks] float32. The last block is padded with zeros. Of a stack [E, out, in], blocks are
    [E, out, num_blocks * BLOCK_SIZE * bits / 8] and scales [E, out, num_blocks].
    """
    if weight.ndim == 3:  # of experts
        parts = [quantize_blocks(each, bits) for each in weight]
        return np.stack([blocks.reshape(len(blocks), -1) for blocks, _ in parts]), np.stack([each for _, each in parts])
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


def largest_integer() -> int:
    """Of a quantised activation, to both sides of the zero point: what the processor sums without saturating.

    ONNX Runtime adds two products in 16 bits on an x86 processor without VNNI: there it is seven bits.
    """
    return 127 if cpu.has_exact_byte_products() else 63


def low_step() -> float:
    """Of the second integer of an activation in sixteen bits: the integers together span one step of the first."""
    return 0.5 / largest_integer()


def row_names(name: str) -> tuple[str, str]:
    """Names of a weight quantised by rows and of its scales."""
    return f"{name}.rows", f"{name}.rows_scales"


def quantize_rows(weight: NDArray[np.generic]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Eight bits and one scale for each output of a weight [out, in], for `MatMulIntegerToFloat`.

    Returns integers [in, out] within +-127 and scales [out]. Activations are quantised by rows while the graph runs, so
    that a row of the product depends on that row alone, bit for bit: integer sums are exact in any order.
    """
    rows, columns = weight.shape
    integers = np.empty((columns, rows), np.int8)
    scales = np.empty(rows, np.float32)
    for start in range(0, rows, _ROWS_PER_CHUNK):
        part = slice(start, start + _ROWS_PER_CHUNK)
        values = np.asarray(weight[part], np.float32)
        scales[part] = np.maximum(np.abs(values).max(axis=1) / 127, np.float32(1e-12))
        integers[:, part] = np.rint(values / scales[part, None]).astype(np.int8).T
    return integers, scales
