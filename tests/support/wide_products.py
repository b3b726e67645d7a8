"""A product of float16 as graphs have it, of so many terms that a sum in float16 would be far off."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.linears import Linears

NUM_TERMS = 12288  # of a down projection of Qwen3-8B
NUM_OUTPUTS = 256
NUM_TOKENS = 8
Array = NDArray[Any]


class OneWeight:
    """A TensorSource of one weight, [NUM_OUTPUTS, NUM_TERMS] float16."""

    def __init__(self, weight: Array) -> None:
        self.weight = weight

    def tensor(self, name: str, element_type: str) -> onnx.TensorProto:
        assert element_type == "float16"
        return numpy_helper.from_array(self.weight, name)


def wide_product() -> tuple[onnx.ModelProto, Array, Array]:
    """The model, its input `x` and the exact output `y`; terms are positive, so that the sum grows to thousands."""
    random = np.random.default_rng(5)
    x = random.uniform(0.5, 1.5, (NUM_TOKENS, NUM_TERMS)).astype(np.float16)
    weight = random.uniform(0.5, 1.5, (NUM_OUTPUTS, NUM_TERMS)).astype(np.float16)
    builder = GraphBuilder("product")
    linear: Any = Linears(builder, OneWeight(weight), None, "float16")  # type: ignore[arg-type]
    linear("x", "weight", output="y")
    model = builder.model({})
    for values, name, width in ((model.graph.input, "x", NUM_TERMS), (model.graph.output, "y", NUM_OUTPUTS)):
        values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["T", width]))
    return model, x, x.astype(np.float64) @ weight.astype(np.float64).T


def assert_summed_in_float32(found: Array, exact: Array) -> None:
    """Rounded once to float16; a running sum in float16 loses about a tenth of such terms."""
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2.0**-10)
