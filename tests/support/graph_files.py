"""Graphs on disk as tests look at them: initial values, element types taken out, and ONNX's own evaluator as a session.

ONNX Runtime has no bfloat16 on a CPU. The evaluator of the onnx package (NumPy and ml_dtypes, operator by operator,
function bodies too) has: slow, and enough for tiny checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from dspark_trt.engines.onnxruntime.session import BoundArrays

FLOAT_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_TYPE_ATTRIBUTES = ("weight_type", "logits_type", "element_type")  # of MarkovHead and RowAttention


def initial_values(graph: Path) -> dict[str, NDArray[Any]]:
    """Weights and constants by name, those outside of the graph file among them."""
    model = onnx.load(graph, load_external_data=False)
    return {tensor.name: _value(tensor, graph.parent) for tensor in model.graph.initializer}


def _value(tensor: TensorProto, folder: Path) -> NDArray[Any]:
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    where = {entry.key: entry.value for entry in tensor.external_data}
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count = int(where["length"]) // dtype.itemsize
    return np.fromfile(folder / where["location"], dtype, count, offset=int(where["offset"])).reshape(tensor.dims)


def without_float_types(graph: Path) -> onnx.ModelProto:
    """The model with every float type set to float32, without values:
    what a 16-bit graph and its twin have in common."""
    model = onnx.load(graph, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type in FLOAT_TYPES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in model.graph.initializer:
        if tensor.data_type in FLOAT_TYPES:
            tensor.CopyFrom(TensorProto(name=tensor.name, dims=tensor.dims, data_type=TensorProto.FLOAT))
    for node in all_nodes(model):
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i in FLOAT_TYPES:
                attribute.i = TensorProto.FLOAT
            if attribute.name in _TYPE_ATTRIBUTES:
                attribute.s = b"float32"
    for entry in model.metadata_props:
        entry.value = entry.value.replace("bfloat16", "float32").replace("float16", "float32")
    return model


def write_twin(half: Path, whole: Path, twin: Path) -> Path:
    """Float32 twins of the 16-bit graphs in `half`: node for node, Casts included, with
    the values of `whole`, the graphs in float32.

    ONNX Runtime runs a twin where it does not run the 16-bit graph.
    """
    twin.mkdir()
    for graph in half.glob("*.onnx"):
        values, model = initial_values(whole / graph.name), without_float_types(graph)
        for tensor in model.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
        onnx.save(model, twin / graph.name)
    return twin


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Nodes of the graph and of function bodies, branches included."""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        yield from _with_branches(nodes)


def _with_branches(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from _with_branches(attribute.g.node)


class EvaluatorSession:
    """Takes the place of `GraphSession`: same graphs, same arrays."""

    def __init__(self, graph: Path, *, num_threads: int | None) -> None:
        values = initial_values(graph)
        model = onnx.load(graph, load_external_data=False)
        for tensor in model.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
        self.metadata = {entry.key: entry.value for entry in model.metadata_props}
        self._evaluator = ReferenceEvaluator(model)

    def run(
        self,
        key: tuple[int, ...],
        in_place: Callable[[], tuple[BoundArrays, BoundArrays]],
        inputs: BoundArrays,
        outputs: BoundArrays,
    ) -> None:
        cache_inputs, cache_outputs = in_place()
        with np.errstate(over="ignore"):  # MarkovHead's padding is -3e38, divided by temperatures
            results = self._evaluator.run(None, {**inputs, **cache_inputs})
        arrays = {**outputs, **cache_outputs}
        for name, result in zip(self._evaluator.output_names, results, strict=True):
            if name not in arrays:  # nobody wants it
                continue
            assert result.dtype == arrays[name].dtype, (name, result.dtype)
            arrays[name][...] = result
