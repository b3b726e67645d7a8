"""Writes `dspark` nodes and their ONNX function bodies, or branches of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import onnx
from dspark_trt_plugins.operation import NAMESPACE, VERSION, attributes_of
from numpy.typing import NDArray
from onnx import helper, numpy_helper

OPSET = 24


class Form(Protocol):
    """A frozen dataclass: what is fixed about an operation when a graph is written."""

    @property
    def input_names(self) -> tuple[str, ...]: ...

    @property
    def output_names(self) -> tuple[str, ...]: ...


def form_node(
    op_type: str, form: Form, inputs: Sequence[str], outputs: Sequence[str], *, name: str | None = None
) -> onnx.NodeProto:
    """A node that calls a function, with the attributes that a TensorRT plugin reads;
    named like its operation if not otherwise.

    `inputs` and `outputs` are value names in the order of `form.input_names` and `form.output_names`.
    """
    assert len(inputs) == len(form.input_names), (inputs, form.input_names)
    assert len(outputs) == len(form.output_names), (outputs, form.output_names)
    return helper.make_node(op_type, inputs, outputs, name=name or op_type, domain=NAMESPACE, **_attributes(form))


def form_function(op_type: str, form: Form, nodes: Iterable[onnx.NodeProto]) -> onnx.FunctionProto:
    """The function that such nodes call."""
    return helper.make_function(
        NAMESPACE,
        op_type,
        list(form.input_names),
        list(form.output_names),
        list(nodes),
        [helper.make_opsetid("", OPSET)],
        list(_attributes(form)),
    )


def _attributes(form: Form) -> dict[str, int | str]:
    return {"plugin_namespace": NAMESPACE, "plugin_version": VERSION, **attributes_of(form)}


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
