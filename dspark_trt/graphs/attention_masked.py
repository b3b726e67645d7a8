"""Attention under a mask over whole rows, for what the kernels of `dspark::RowAttention` do not do: a window, a sink,
or another scale of the scores. Its cost follows the capacity of a row.

Shape letters: `B` rows and `S` padded query length of a group, `N`/`K` query/KV heads, `H` head dim, `C` row capacity.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dspark_trt.checkpoints.layout import SINK
from dspark_trt.checkpoints.spec import BlockDrafterSpec, DecoderSpec
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.graphs.builder import ONNX_TYPES, GraphBuilder
from dspark_trt.graphs.weights import TensorSource

Attend = Callable[
    [int, str, str, str], str
]  # layer, queries [B, N, S, H], keys and values [B, K, C, H] -> [B, N, S, H]
_MAX_HEAD_DIM = 256  # of TensorRT's own attention
_UNSEEN = -1e30


class Sinks:
    """Logits that the softmax of a layer's heads has besides those of positions, where the layer has a sink."""

    def __init__(self, builder: GraphBuilder, drafter: BlockDrafterSpec, source: TensorSource) -> None:
        self._builder = builder
        self._drafter = drafter
        self._source = source

    def of(self, layer: int) -> str:
        """float32 [N]; empty where the layer has none."""
        if not self._drafter.attention_of(layer).has_sink:
            return ""
        return self._builder.initializer(self._source.tensor(SINK.format(layer), "float32"))


def masked_attention(
    builder: GraphBuilder,
    spec: DecoderSpec,
    dims: TargetDims | DrafterDims,
    first_seen: str | None,
    last_seen: str,
    sinks: Sinks | None = None,
) -> Attend:
    """Each query sees the positions from `first_seen` to `last_seen`, both [B, S] or of that shape when broadcast.
    `sinks` of the layers, where some have one."""
    positions = builder.constant(np.arange(dims.cache.capacity, dtype=np.int64))
    mask = builder.op("LessOrEqual", positions, builder.op("Unsqueeze", last_seen, builder.vector(1, 3)))
    if first_seen is not None:
        is_near = builder.op("GreaterOrEqual", positions, builder.op("Unsqueeze", first_seen, builder.vector(1, 3)))
        mask = builder.op("And", mask, is_near)  # [B, 1, S, C]

    def attend(layer: int, query: str, keys: str, values: str) -> str:
        sink = sinks.of(layer) if sinks is not None else ""
        if spec.shape_of(layer).head_dim <= _MAX_HEAD_DIM and not sink:
            return builder.op("Attention", query, keys, values, mask, scale=spec.score_scale_of(layer))
        return _wide_attention(builder, spec, layer, dims, (query, keys, values), mask, sink)

    return attend


def _wide_attention(
    builder: GraphBuilder,
    spec: DecoderSpec,
    layer: int,
    dims: TargetDims | DrafterDims,
    inputs: tuple[str, str, str],
    mask: str,
    sink: str,
) -> str:
    """In products of matrices, with scores in float32. Query heads that share a KV head are more queries of it.
    `sink` [N] of the heads, or empty."""
    query, keys, values = inputs
    shape, capacity, is_cast = spec.shape_of(layer), dims.cache.capacity, dims.element_type != "float32"
    if is_cast:
        query, keys = (builder.op("Cast", each, to=ONNX_TYPES["float32"]) for each in (query, keys))
    folded = builder.op("Reshape", query, builder.vector(0, shape.num_kv_heads, -1, shape.head_dim))
    scores = builder.op("MatMul", folded, builder.op("Transpose", keys, perm=[0, 1, 3, 2]))  # [B, K, N / K * S, C]
    scale = builder.constant(np.array(spec.score_scale_of(layer), np.float32))
    of_heads = builder.op("Reshape", builder.op("Mul", scores, scale), builder.vector(0, spec.num_heads, -1, capacity))
    seen = builder.op("Where", mask, of_heads, builder.constant(np.array(_UNSEEN, np.float32)))  # [B, N, S, C]
    if sink:
        of_queries = builder.op("Shape", builder.op("Gather", seen, builder.vector(0), axis=3))  # B, N, S, 1
        columns = builder.op("Expand", builder.op("Reshape", sink, builder.vector(1, -1, 1, 1)), of_queries)
        seen = builder.op("Concat", seen, columns, axis=3)
    weights = builder.op("Softmax", seen, axis=-1)
    if sink:  # what falls to the sink goes nowhere
        weights = builder.op("Slice", weights, builder.vector(0), builder.vector(capacity), builder.vector(3))
    if is_cast:
        weights = builder.op("Cast", weights, to=ONNX_TYPES[dims.element_type])
    of_kv_heads = builder.op("Reshape", weights, builder.vector(0, shape.num_kv_heads, -1, capacity))
    attended = builder.op("MatMul", of_kv_heads, values)  # [B, K, N / K * S, H]
    return builder.op("Reshape", attended, builder.vector(0, spec.num_heads, -1, shape.head_dim))
