"""A small writer of ONNX graphs: nodes under readable names, constants once, inputs and outputs from `bindings`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dspark_trt import __version__
from dspark_trt.contract.bindings import Binding, ElementType

OPSET = 24
IR_VERSION = 11
CONTRIB_DOMAIN = "com.microsoft"
ONNX_TYPES: dict[ElementType, int] = {
    "int64": TensorProto.INT64,
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}


Branch = tuple[Sequence[onnx.NodeProto], Sequence[str]]  # nodes, and the values that leave it


class GraphBuilder:
    """Collects one graph. Values are their names; `scope` puts a prefix before the names made inside."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._inputs: dict[str, onnx.ValueInfoProto] = {}
        self._outputs: dict[str, onnx.ValueInfoProto] = {}
        self._functions: dict[tuple[str, str], onnx.FunctionProto] = {}
        self._domains = {"": OPSET}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._counts: dict[str, int] = {}
        self._prefix = ""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        outer, self._prefix = self._prefix, f"{self._prefix}{name}/"
        try:
            yield
        finally:
            self._prefix = outer

    def op(self, op_type: str, *inputs: str, output: str | None = None, domain: str = "", **attributes: Any) -> str:
        """A node with one output, under a fresh name or under `output`. An empty input name is an input left out."""
        return self.multi_op(op_type, *inputs, outputs=(output,), domain=domain, **attributes)[0]

    def multi_op(
        self, op_type: str, *inputs: str, outputs: Iterable[str | None], domain: str = "", **attributes: Any
    ) -> tuple[str, ...]:
        """A node with several outputs; None asks for a fresh name."""
        name = self.fresh(op_type)
        names = tuple(output or f"{name}:{index}" for index, output in enumerate(outputs))
        self._nodes.append(helper.make_node(op_type, inputs, names, name=name, domain=domain, **attributes))
        self._domains.setdefault(domain, 1)
        return names

    @contextmanager
    def branch(self) -> Iterator[list[onnx.NodeProto]]:
        """Nodes that are made inside belong to a branch of `choose`. They see every value outside."""
        outer, self._nodes = self._nodes, []
        try:
            yield self._nodes
        finally:
            self._nodes = outer

    def choose(
        self, condition: str, then: Branch, other: Branch, *, element_type: ElementType, outputs: Iterable[str | None]
    ) -> tuple[str, ...]:
        """The values of one of two branches, all of that element type; None asks for a fresh name."""
        subgraphs = [
            helper.make_graph(
                nodes,
                self.fresh("branch"),
                [],
                [helper.make_tensor_value_info(value, ONNX_TYPES[element_type], None) for value in values],
            )
            for nodes, values in (then, other)
        ]
        return self.multi_op("If", condition, outputs=outputs, then_branch=subgraphs[0], else_branch=subgraphs[1])

    def node(self, node: onnx.NodeProto, function: onnx.FunctionProto) -> None:
        """A node of a custom domain together with its function body, which all nodes of that operation share."""
        known = self._functions.setdefault((function.domain, function.name), function)
        assert known == function, f"{function.name} in two forms"
        self._nodes.append(node)
        self._domains.setdefault(node.domain, 1)

    def constant(self, value: NDArray[Any]) -> str:
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._initializers[name] = numpy_helper.from_array(value, name)
            self._constants[key] = name
        return self._constants[key]

    def scalar(self, value: int) -> str:
        return self.constant(np.array(value, np.int64))

    def vector(self, *values: int) -> str:
        """Axes, shapes and extents: int64 [number of values]."""
        return self.constant(np.array(values, np.int64))

    def initializer(self, tensor: TensorProto, *, can_be_overridden: bool = False) -> str:
        """A weight. One that can be overridden is listed among the inputs too; ONNX Runtime then leaves it as it is
        in the file, memory-mapped, where it would pack a constant again for every node that reads it.
        """
        known = self._initializers.setdefault(tensor.name, tensor)
        assert known == tensor, f"two tensors of the name {tensor.name}"
        if can_be_overridden:
            info = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            self._inputs[tensor.name] = info
        return str(tensor.name)

    def input(self, binding: Binding) -> str:
        self._inputs[binding.name] = _value_info(binding)
        return binding.name

    def output(self, binding: Binding) -> str:
        """Declare an output; some node has to write the name."""
        self._outputs[binding.name] = _value_info(binding)
        return binding.name

    def model(self, metadata: Mapping[str, str]) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes,
            self._name,
            list(self._inputs.values()),
            list(self._outputs.values()),
            list(self._initializers.values()),
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(domain, version) for domain, version in self._domains.items()],
            functions=list(self._functions.values()),
            ir_version=IR_VERSION,
            producer_name="dspark-trt",
            producer_version=__version__,
        )
        helper.set_model_props(model, dict(metadata))
        return model

    def save(self, path: Path, metadata: Mapping[str, str]) -> None:
        path.write_bytes(self.model(metadata).SerializeToString())

    def fresh(self, op_type: str) -> str:
        """The name of a node of this type, given once."""
        stem = f"{self._prefix}{op_type}"
        count = self._counts[stem] = self._counts.get(stem, -1) + 1
        return f"{stem}_{count}" if count else stem


def _value_info(binding: Binding) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(binding.name, ONNX_TYPES[binding.element_type], list(binding.shape))
