"""Random inputs of RowAttention and PageWrite, and models of their function bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from dspark_trt_plugins.body import OPSET
from dspark_trt_plugins.operation import NAMESPACE, Tensor
from dspark_trt_plugins.page_write.form import PageWriteForm
from dspark_trt_plugins.page_write.function_body import page_write_function, page_write_node
from dspark_trt_plugins.page_write.launches import PageWriteOperation
from dspark_trt_plugins.row_attention.form import FloatType, RowAttentionForm
from dspark_trt_plugins.row_attention.function_body import row_attention_function, row_attention_node
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation
from numpy.typing import NDArray
from onnx import TensorProto, helper

Arrays = dict[str, NDArray[Any]]
PAGE_POSITIONS = 64
NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
}
# Of the largest value, 1 here: weights are rounded to the element type before they meet the values, and so is the
# result.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Rows:
    """Positions before a row's queries, and how many it has; 0: the row is idle. Padded to `num_slots`."""

    past: Sequence[int]
    queries: Sequence[int]
    num_slots: int

    @staticmethod
    def alike(past: Sequence[int], num_slots: int) -> Rows:
        """All of them have `num_slots` queries."""
        return Rows(past, [num_slots] * len(past), num_slots)


def attention_form(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    capacity: int,
    num_slots: int,
    element_type: FloatType,
    *,
    num_chunk_slots: int = 0,
    is_causal: bool = True,
) -> RowAttentionForm:
    """Of rows that have at least so many positions."""
    width = -(-capacity // PAGE_POSITIONS)
    return RowAttentionForm(
        num_heads, num_kv_heads, head_dim, PAGE_POSITIONS, width, num_slots, num_chunk_slots, is_causal, element_type
    )


def random_call(
    form: RowAttentionForm, rows: Rows, chunks: Rows | None = None, *, num_padding: int = 0, seed: int = 0
) -> Arrays:
    """Inputs of float32 whose values the element type has. Every page that is not a row's own, everything behind a
    row's last query, and page 0, which stands behind the tables, hold NaN or Inf; tokens of no row hold NaN."""
    random = np.random.default_rng(seed)
    groups = [rows] if chunks is None else [rows, chunks]
    past = np.array([each for group in groups for each in group.past], np.int64)
    queries = np.array([each for group in groups for each in group.queries], np.int64)
    num_live = past + queries
    counts = -(-num_live // form.page_positions)
    num_pages = 2 * int(counts.sum()) + 3
    own = random.permutation(np.arange(1, num_pages))[: counts.sum()]
    tables = np.zeros((len(past), form.table_width), np.int64)
    pages = np.full((num_pages, 2, form.num_kv_heads, form.page_positions, form.head_dim), np.nan, np.float32)
    pages[::2, 0] = np.inf
    ends = counts.cumsum()
    for row, (end, count, live) in enumerate(zip(ends, counts, num_live, strict=True)):
        tables[row, :count] = own[end - count : end]
        for at, page in enumerate(tables[row, :count]):
            held = min(int(live) - at * form.page_positions, form.page_positions)
            shape = (form.num_kv_heads, held, form.head_dim)
            pages[page, 0, :, :held] = random.normal(0, 1, shape)
            pages[page, 1, :, :held] = random.uniform(-1, 1, shape)
    num_tokens = int(queries.sum())
    query = np.full((num_tokens + num_padding, form.num_heads * form.head_dim), np.nan)
    query[:num_tokens] = random.normal(0, 2, (num_tokens, form.num_heads * form.head_dim))
    kind = NUMPY_TYPES[form.element_type]
    first_tokens = queries.cumsum() - queries
    call = {
        "query": query.astype(kind).astype(np.float32),
        "pages": pages.astype(kind).astype(np.float32),
        "first_tokens": first_tokens,
        "past_lengths": past,
        "query_lengths": queries,
        "block_tables": tables,
        "row_tokens": np.zeros((len(rows.past), rows.num_slots), np.int64),
    }
    if chunks is not None:
        call["chunk_tokens"] = np.zeros((len(chunks.past), chunks.num_slots), np.int64)
    return call


def without_poison(inputs: Arrays) -> Arrays:
    """The function body reads behind the live positions: 0 * NaN gets through it."""
    return {name: np.nan_to_num(value, nan=0, posinf=0) for name, value in inputs.items()}


def paged_model(form: RowAttentionForm, num_layers: int = 1) -> onnx.ModelProto:
    """As a target attends: each layer writes new keys and values into its pool, which stays where it is, and attends
    with what the one before made. New keys and values are those of the queries' heads, the first ones."""
    operation = RowAttentionOperation(form)
    tensors = {tensor.name: tensor for tensor in operation.inputs}
    write = PageWriteForm(form.num_kv_heads, form.head_dim, form.page_positions, form.element_type)
    packed = replace(tensors["query"], shape=("T", form.num_kv_heads * form.head_dim))
    inputs = [_info(name, tensor) for name, tensor in tensors.items() if name != "pages"]
    inputs += [_info("slots", Tensor("slots", "int64", ("T",))), _info("keys", packed), _info("values", packed)]
    outputs, nodes, query = [], [], "query"
    for layer in range(num_layers):
        pool, written, output = f"pages.{layer}", f"pages.{layer}.out", f"attended.{layer}"
        inputs.append(_info(pool, tensors["pages"]))
        outputs.append(_info(written, tensors["pages"]))
        nodes.append(page_write_node(write, ["keys", "values", "slots", pool], [written], name=f"PageWrite.{layer}"))
        given = [query, written, *(name for name in tensors if name not in ("query", "pages"))]
        nodes.append(row_attention_node(form, given, [output], name=f"RowAttention.{layer}"))
        query = output
    graph = helper.make_graph(nodes, "paged", inputs, [_info(query, operation.outputs[0]), *outputs])
    return _model(graph, [page_write_function(write), row_attention_function(form)])


def attention_model(form: RowAttentionForm) -> onnx.ModelProto:
    """One node."""
    operation = RowAttentionOperation(form)
    names = [tensor.name for tensor in operation.inputs]
    node = row_attention_node(form, names, ["attended"])
    inputs = [_info(tensor.name, tensor) for tensor in operation.inputs]
    graph = helper.make_graph([node], "row_attention", inputs, [_info("attended", operation.outputs[0])])
    return _model(graph, [row_attention_function(form)])


def write_model(form: PageWriteForm) -> onnx.ModelProto:
    """One node."""
    operation = PageWriteOperation(form)
    names = [tensor.name for tensor in operation.inputs]
    inputs = [_info(tensor.name, tensor) for tensor in operation.inputs]
    node = page_write_node(form, names, ["written"])
    graph = helper.make_graph([node], "page_write", inputs, [_info("written", operation.outputs[0])])
    return _model(graph, [page_write_function(form)])


def _model(graph: onnx.GraphProto, functions: list[onnx.FunctionProto]) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(NAMESPACE, 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=11)


def _info(name: str, tensor: Tensor) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ONNX_TYPES[tensor.element_type], tensor.shape)
