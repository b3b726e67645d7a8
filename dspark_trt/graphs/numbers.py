"""Element types of one build's graphs, and where they change from one to another.

Nodes follow the *nominal* types, the file has the *written* ones. They differ in a twin only: the graphs of a 16-bit
precision, node for node, Casts included, with float32 wherever a 16-bit type stood. ONNX Runtime has no bfloat16 on a
CPU and runs the twin instead.

What stays float32 in a 16-bit graph: norms with their weights, logits, confidences, temperatures, uniforms and
everything inside of MarkovHead. In float16 also the drafter's `fc` and `hidden_norm`: taps are raw residual streams,
whose massive activations (beyond 2e4 for Qwen3-8B) `fc` would carry past 65504.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.dims import Attention, FloatType
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
    """Nominal element types of a precision."""

    model: FloatType = "float32"  # weights, hidden states, taps, caches, base logits
    context: FloatType = "float32"  # the drafter's fc and what comes out of it
    is_twin: bool = False

    def written(self, nominal: FloatType) -> FloatType:
        """What stands in the file where the graph has `nominal`."""
        return "float32" if self.is_twin else nominal

    def cast(self, builder: GraphBuilder, x: str, source: FloatType, to: FloatType, output: str | None = None) -> str:
        """`x` of nominal type `source` as `to`; no node where they are the same, and then `output` is not written."""
        return x if source == to else builder.op("Cast", x, to=ONNX_TYPES[self.written(to)], output=output)

    def table(self, values: NDArray[np.float32]) -> NDArray[np.generic]:
        """A constant of the model's type."""
        return values.astype(NUMPY_TYPES[self.written(self.model)], copy=False)


def numbers_of(precision: Precision, attention: Attention, *, twin: bool = False) -> Numbers:
    """Raises ExportError for a 16-bit precision with another attention than `standard`,
    or a twin of one without Casts."""
    match precision:
        case "bf16":
            numbers = Numbers("bfloat16", "bfloat16", twin)
        case "fp16":
            numbers = Numbers("float16", "float32", twin)
        case _:
            if twin:
                raise ExportError(f"precision {precision} has no float32 twin; expected 'bf16' or 'fp16'")
            return Numbers()
    if attention != "standard":
        raise ExportError(
            f"precision {precision}: expected attention 'standard', found {attention!r}; ONNX Runtime's forms are "
            "float32, choose --precision fp32, int8 or int4 for it"
        )
    return numbers
