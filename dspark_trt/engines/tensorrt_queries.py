"""Rewrites attention so that TensorRT-RTX reads the caches where they are, and of them what is visible.

Left alone, the compiler chooses a layout for the queries and then copies keys and values of the whole capacity into the like of
it, in every layer of every call. Queries in memory of the caller's have a layout that is given, and it reads the caches in place.
And it lists the tiles of the cache that a mask lets through, so that attention visits no others, where the mask has one
reader; a mask of several is read from end to end. So each layer writes its queries into a buffer that is bound like a cache,
and has a mask of its own. Read off the compiler's listing of layers (docs/adr/0007).

Rows that verify and draft blocks are rewritten. Prefill chunks are not: their queries are many, and so would be the memory.

Shape letters: `B` rows and `S` padded query length of a group, `Q` the longest one, `N` query heads, `H` head dim, `C` capacity.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from dspark_trt import bindings
from dspark_trt.dims import FloatType

_KIND = "queries"
_PREFIX = "held/"
# The input whose length is B, and the one whose second extent is S where that is up to the call.
_ROWS = {bindings.DECODE: bindings.group_past_lengths(bindings.DECODE), bindings.CONTEXT: bindings.ROW_QUERY_LENGTHS}
_TOKENS = {bindings.DECODE: bindings.group_tokens(bindings.DECODE)}


def query_buffer(group: str, layer: int) -> str:
    """The input [B, N, Q, H]; its output has the name that a cache's would have, and is the same memory."""
    return f"{group}.{_KIND}.{layer}"


def rows_input(name: str) -> str | None:
    """The input that has as many rows as the query buffer of this name has to have; None for any other input."""
    group, _, rest = name.partition(f".{_KIND}.")
    return _ROWS[group] if rest.isdecimal() else None


def hold_queries(
    model: onnx.ModelProto, longest: Mapping[str, int], element_type: FloatType
) -> tuple[onnx.ModelProto, tuple[bindings.Binding, ...]]:
    """The model with its queries held, and the inputs that it has more.

    Args:
        model: a graph of `standard` attention; weights need not be loaded. It is not changed.
        longest: Q by row group; groups that are not named stay as they are.

    Attention with as many key as query heads stays as it is: the compiler copies there whatever the queries are.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    shapes = _shapes(model)
    producers = {output: node for node in graph.node for output in node.output}
    held: list[bindings.Binding] = []
    nodes: list[NodeProto] = []
    for node in graph.node:
        group, layer = _cache_of(node)
        if group not in longest or shapes[node.input[0]][1] == shapes[node.input[1]][1]:
            nodes.append(node)
            continue
        _, num_heads, _, head_dim = shapes[node.input[0]]
        shape = (f"B_{group}", num_heads, longest[group], head_dim)
        held.append(bindings.Binding(query_buffer(group, layer), element_type, shape))
        if not any(binding.name == query_buffer(group, 0) for binding in held[:-1]):
            nodes += _shared(graph, group, longest[group])
        nodes += _held(node, producers[node.input[3]], group, layer)
    del graph.node[:]
    graph.node.extend(nodes)
    for values, name in ((graph.input, str), (graph.output, bindings.cache_output)):
        values.extend(_value_info(name(binding.name), binding) for binding in held)
    return result, tuple(held)


def _cache_of(node: NodeProto) -> tuple[str, int]:
    """Row group and layer of the keys that an Attention node reads; no group for any other node."""
    if node.op_type != "Attention":
        return "", 0
    group, _, rest = node.input[1].partition(".key_cache.")
    return group, int(rest.removesuffix(bindings.cache_output("")))


def _shared(graph: onnx.GraphProto, group: str, longest: int) -> list[NodeProto]:
    """Nodes that all layers of a group read."""
    values = {"zero": 0, "one": [1], "two": [2], "begin": [0], "around": [1, 3], "slots": np.arange(longest)}
    for name, value in values.items():
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), f"{_PREFIX}{group}/{name}"))
    return [
        _node(group, "Mul", [_ROWS[group], "zero"], "nowhere_behind"),
        *(
            (
                _node(group, "Shape", [_TOKENS[group]], "length", start=1),
                _node(group, "Unsqueeze", [_ROWS[group], "one"], "past"),
                _node(group, "Add", ["past", "slots"], "last_seen"),
                _node(group, "Unsqueeze", ["last_seen", "around"], "limits"),
            )
            if group in _TOKENS
            else ()
        ),
    ]


def _held(attention: NodeProto, mask: NodeProto, group: str, layer: int) -> list[NodeProto]:
    assert mask.op_type == "LessOrEqual", f"{attention.name}: the mask is a comparison of positions with limits"
    query, key, value, _ = attention.input
    positions, limits = mask.input
    buffer = query_buffer(group, layer)
    scatter = _node(group, "TensorScatter", [buffer, query, "nowhere_behind"], bindings.cache_output(buffer), axis=2)
    own_mask = f"{_PREFIX}{group}/{layer}/mask"
    compare = _node(group, "LessOrEqual", [positions, "limits" if group in _TOKENS else limits], own_mask)
    result = NodeProto()
    result.CopyFrom(attention)
    result.input[:] = [scatter.output[0], key, value, own_mask]
    if group not in _TOKENS:
        return [scatter, compare, result]
    all_slots = f"{_PREFIX}{group}/{layer}/attended"
    result.output[0] = all_slots
    return [scatter, compare, result, _node(group, "Slice", [all_slots, "begin", "length", "two"], attention.output[0])]


def _node(group: str, op_type: str, inputs: list[str], output: str, **attributes: int) -> NodeProto:
    """Names that stand in `_shared` are those of the group."""
    own = {"zero", "one", "two", "begin", "around", "slots", "nowhere_behind", "length", "past", "last_seen", "limits"}
    inputs, outputs = (
        [f"{_PREFIX}{group}/{name}" if name in own else name for name in names] for names in (inputs, [output])
    )
    return helper.make_node(op_type, inputs, outputs, name=f"{outputs[0]}/{op_type}", **attributes)


def _shapes(model: onnx.ModelProto) -> dict[str, list[int]]:
    """Extents of every tensor of known rank; 0 where the call decides."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    return {
        info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        for info in (*inferred.input, *inferred.value_info, *inferred.output)
    }


def _value_info(name: str, binding: bindings.Binding) -> onnx.ValueInfoProto:
    types = {
        "float16": onnx.TensorProto.FLOAT16,
        "bfloat16": onnx.TensorProto.BFLOAT16,
        "float32": onnx.TensorProto.FLOAT,
    }
    return helper.make_tensor_value_info(name, types[binding.element_type], list(binding.shape))
