"""Attention under a mask over whole rows: without the kernels of `dspark::RowAttention`, and for what they do not do, a
window, a sink, or another scale of the scores. Its cost follows the capacity of a row.

Query heads that share one of several KV heads are more queries of it: TensorRT would copy the keys and values of every
row for each of them.

Shape letters: `B` rows and `S` padded query length of a group, `N`/`K` query/KV heads, `H` head dim, `C` row capacity.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dspark_trt.checkpoints.layout import SINK
from dspark_trt.checkpoints.spec import BlockDrafterSpec, DecoderSpec
from dspark_trt.contract.dims import MASK_SCOPE, NATIVE_HEAD_DIMS, DrafterDims, TargetDims
from dspark_trt.graphs.builder import ONNX_TYPES, GraphBuilder
from dspark_trt.graphs.weights import TensorSource

Attend = Callable[
    [int, str, str, str], str
]  # layer, queries [B, N, S, H], keys and values [B, K, C, H] -> [B, N, S, H]
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
    """Each query sees the positions from `first_seen` to `last_seen`, both [B, S]. `sinks` of the layers, where some
    have one."""
    positions = builder.constant(np.arange(dims.cache.capacity, dtype=np.int64))
    masks: dict[int, str] = {}

    def mask_of(group: int) -> str:
        """Of `group` query heads that share a KV head, one behind the other: [B, 1, group * S, C]."""
        if group not in masks:
            with builder.scope(MASK_SCOPE):
                mask = builder.op("LessOrEqual", positions, _limits(builder, last_seen, group))
                if first_seen is not None:
                    is_near = builder.op("GreaterOrEqual", positions, _limits(builder, first_seen, group))
                    mask = builder.op("And", mask, is_near)
            masks[group] = mask
        return masks[group]

    def attend(layer: int, query: str, keys: str, values: str) -> str:
        shape, sink = spec.shape_of(layer), sinks.of(layer) if sinks is not None else ""
        if shape.head_dim not in NATIVE_HEAD_DIMS or sink:
            return _product_attention(builder, spec, layer, dims, (query, keys, values), mask_of(1), sink)
        if shape.num_kv_heads == 1:  # of one head with several queries TensorRT has no kernel
            return builder.op("Attention", query, keys, values, mask_of(1), scale=spec.score_scale_of(layer))
        mask = mask_of(spec.num_heads // shape.num_kv_heads)
        queries = builder.op("Reshape", query, builder.vector(0, shape.num_kv_heads, -1, shape.head_dim))
        attended = builder.op("Attention", queries, keys, values, mask, scale=spec.score_scale_of(layer))
        return builder.op("Reshape", attended, builder.vector(0, spec.num_heads, -1, shape.head_dim))

    return attend


def _limits(builder: GraphBuilder, positions: str, group: int) -> str:
    """[B, S] -> [B, 1, group * S, 1]."""
    if group > 1:  # not Tile of the mask, which TensorRT-RTX 1.7.1 cannot compile beside experts
        positions = builder.op("Concat", *[positions] * group, axis=1)
    return builder.op("Unsqueeze", positions, builder.vector(1, 3))


def _product_attention(
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
