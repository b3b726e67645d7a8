"""Rows whose positions stand in pages of a KV pool, in a graph: where the tokens of a call go, writing them, and rows
copied out again.

Shape letters: `T` packed tokens, `B` rows and `S` padded query length of a group, `K` KV heads, `H` head dim, `C` row
capacity, `W` pages of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from dspark_trt_plugins.page_write.form import PageWriteForm
from dspark_trt_plugins.page_write.function_body import page_write_function, page_write_node
from onnx import TensorProto

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.numbers import NUMPY_TYPES


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a call, in the order of their tokens."""

    first_tokens: str  # [B] packed index of the row's first token
    past_lengths: str  # [B]
    query_lengths: str  # [B], 0 for a row without tokens
    block_tables: str  # [B, W]
    groups: tuple[str, ...]  # [B, S] each, tokens of the rows that stand one behind the other


class PageWriter:
    """New keys and values of one call."""

    def __init__(self, builder: GraphBuilder, spec: DecoderSpec, dims: TargetDims | DrafterDims, slots: str) -> None:
        """`slots` [T]: page * page_positions + position in the page."""
        self._builder = builder
        self._spec = spec
        self._dims = dims
        self._slots = slots

    def write(self, layer: int, key: str, value: str) -> str:
        """[T, K * H] each -> the layer's pool that holds them."""
        shape, pool = self._spec.shape_of(layer), bindings.page_cache(layer)
        form = PageWriteForm(
            shape.num_kv_heads, shape.head_dim, self._dims.cache.page_positions, self._dims.element_type
        )
        output, name = bindings.cache_output(pool), self._builder.fresh("PageWrite")
        node = page_write_node(form, [key, value, self._slots, pool], [output], name=name)
        self._builder.node(node, page_write_function(form))
        return output


def gathered_rows(
    builder: GraphBuilder,
    spec: DecoderSpec,
    dims: TargetDims | DrafterDims,
    layer: int,
    pool: str,
    *,
    tables: str,
    num_live: str,
) -> tuple[str, str]:
    """Keys and values of whole rows, [B, K, C, H], copied out of a layer's pool; zeros behind the first `num_live` [B]
    positions, where anything may stand, NaN too, which no mask hides."""
    pages = builder.op("Gather", pool, tables, axis=0)  # [B, W, 2, K, page_positions, H]
    both = builder.op("Transpose", pages, perm=[2, 0, 3, 1, 4, 5])
    shape = spec.shape_of(layer)
    rows = builder.vector(-1, shape.num_kv_heads, dims.cache.capacity, shape.head_dim)
    keys, values = builder.multi_op("Split", both, outputs=(None, None), axis=0, num_outputs=2)
    is_live = builder.op(
        "Less",
        builder.constant(np.arange(dims.cache.capacity, dtype=np.int64)[:, None]),
        builder.op("Unsqueeze", num_live, builder.vector(1, 2, 3)),
    )  # [B, 1, C, 1]
    zero = builder.constant(np.zeros((), NUMPY_TYPES[dims.element_type]))
    keys, values = (builder.op("Where", is_live, builder.op("Reshape", each, rows), zero) for each in (keys, values))
    return keys, values


def rows_of_groups(builder: GraphBuilder, groups: tuple[str, ...]) -> PagedRows:
    def joined(name: Callable[[str], str]) -> str:
        parts = [name(group) for group in groups]
        return parts[0] if len(parts) == 1 else builder.op("Concat", *parts, axis=0)

    query_lengths = joined(bindings.group_query_lengths)
    ends = builder.op("CumSum", query_lengths, builder.scalar(0))
    return PagedRows(
        first_tokens=builder.op("Sub", ends, query_lengths),
        past_lengths=joined(bindings.group_past_lengths),
        query_lengths=query_lengths,
        block_tables=joined(bindings.group_block_tables),
        groups=tuple(bindings.group_tokens(group) for group in groups),
    )


def slots_of_tokens(
    builder: GraphBuilder, dims: TargetDims | DrafterDims, rows: PagedRows, positions: str
) -> tuple[str, str]:
    """Of each packed token its row, 0 for padding, and its slot in the pool, in page 0 for padding: [T]."""
    ends = builder.op("Add", rows.first_tokens, rows.query_lengths)
    tokens = count_to(builder, builder.op("Shape", positions))
    is_behind = builder.op("GreaterOrEqual", builder.op("Unsqueeze", tokens, builder.vector(1)), ends)  # [T, B]
    num_before = builder.op("Cast", is_behind, to=TensorProto.INT64)
    row = builder.op("ReduceSum", num_before, builder.vector(1), keepdims=0)
    is_padding = builder.op("GreaterOrEqual", tokens, builder.op("ReduceMax", ends, builder.vector(0)))
    row = builder.op("Where", is_padding, builder.scalar(0), row)
    slots = slots_at(builder, dims, rows.block_tables, row, positions)
    return row, builder.op("Where", is_padding, builder.scalar(0), slots)


def slots_at(
    builder: GraphBuilder, dims: TargetDims | DrafterDims, tables: str, row_of_token: str, positions: str
) -> str:
    """[T], from the row and the position of each token."""
    page_positions = builder.scalar(dims.cache.page_positions)
    entry = builder.op(
        "Add",
        builder.op("Mul", row_of_token, builder.scalar(dims.cache.table_width)),
        builder.op("Div", positions, page_positions),
    )
    page = builder.op("Gather", builder.op("Reshape", tables, builder.vector(-1)), entry, axis=0)
    return builder.op("Add", builder.op("Mul", page, page_positions), builder.op("Mod", positions, page_positions))


def count_to(builder: GraphBuilder, extent: str) -> str:
    """0 .. extent - 1, of an extent [1]."""
    return builder.op("Range", builder.scalar(0), builder.op("Squeeze", extent, builder.vector(0)), builder.scalar(1))


def on_device(builder: GraphBuilder, extent: str) -> str:
    """An extent [1] as a number that a device computes: a compiler would copy a shape over from the host."""
    last = builder.op("ReduceMax", count_to(builder, extent), builder.vector(0))
    return builder.op("Add", last, builder.scalar(1))
