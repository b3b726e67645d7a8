"""Writes the nodes of an ONNX function body or of a branch of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper


class Body:
    """Collects nodes under fresh value names; `branch` opens a sub-graph that sees the names outside.

    TensorRT wants names that no other function body of the graph has: give each body its own prefix.
    """

    def __init__(self, prefix: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._prefix = prefix
        self._count = 0
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def fresh(self) -> str:
        self._count += 1
        return f"{self._prefix}v{self._count}"

    def op(self, op_type: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        output = output or self.fresh()
        self.nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def split(self, value: str, count: int, axis: int) -> list[str]:
        parts = [self.fresh() for _ in range(count)]
        self.nodes.append(helper.make_node("Split", [value], parts, axis=axis, num_outputs=count))
        return parts

    def constant(self, value: NDArray[Any]) -> str:
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=numpy_helper.from_array(value))
        return self._constants[key]

    def float32(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def float64(self, value: float) -> str:
        return self.constant(np.array(value, np.float64))

    def scalar(self, value: int) -> str:
        return self.constant(np.array(value, np.int64))

    def axes(self, *axes: int) -> str:
        return self.constant(np.array(axes, np.int64))

    def branch(self) -> Body:
        return Body(f"{self.fresh()}_")

    def graph(self, result: str, element_type: int) -> onnx.GraphProto:
        value = helper.make_tensor_value_info(result, element_type, None)
        return helper.make_graph(self.nodes, result, [], [value])
