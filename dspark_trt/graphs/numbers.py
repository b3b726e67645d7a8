"""Element types of one build's graphs, and where they change from one to another.

What stays float32 in a 16-bit graph: norms with their weights, logits, confidences, temperatures, uniforms and
everything inside of MarkovHead. In float16 also the drafter's `fc` and `hidden_norm`: taps are raw residual streams,
whose massive activations (beyond 2e4 for Qwen3-8B) `fc` would carry past 65504; and the residual stream of an EAGLE-3
drafter, which begins with what `fc` gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.dims import PORTABLE, Attention, FloatType
from dspark_trt.contract.precision import Precision
from dspark_trt.errors import ExportError
from dspark_trt.graphs.builder import ONNX_TYPES, GraphBuilder

NUMPY_TYPES: dict[FloatType, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class Numbers:
    """Element types of a precision."""

    model: FloatType = "float32"  # weights, hidden states, taps, caches, base logits
    context: FloatType = "float32"  # the drafter's fc and what comes out of it

    def cast(self, builder: GraphBuilder, x: str, source: FloatType, to: FloatType, output: str | None = None) -> str:
        """`x` of type `source` as `to`; no node where they are the same, and then `output` is not written."""
        return x if source == to else builder.op("Cast", x, to=ONNX_TYPES[to], output=output)

    def table(self, values: NDArray[np.float32]) -> NDArray[np.generic]:
        """A constant of the model's type."""
        return values.astype(NUMPY_TYPES[self.model], copy=False)


def numbers_of(precision: Precision, attention: Attention) -> Numbers:
    """Raises ExportError for a 16-bit precision with an attention that is ONNX Runtime's own."""
    match precision:
        case "bf16":
            numbers = Numbers("bfloat16", "bfloat16")
        case "fp16":
            numbers = Numbers("float16", "float32")
        case _:
            return Numbers()
    if attention not in PORTABLE:
        raise ExportError(
            f"precision {precision}: expected attention 'standard', found {attention!r}; ONNX Runtime's forms are "
            "float32, choose --precision fp32, int8 or int4 for it"
        )
    return numbers
