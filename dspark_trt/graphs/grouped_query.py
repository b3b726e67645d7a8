"""`com.microsoft.GroupQueryAttention` of ONNX Runtime: a node of it, and the forms that its CPU kernels run well
(docs/adr/0015).

Two facts about the kernels of 1.32 decide (MLAS, `gqa_attention_base.h`, `flashattn_gqa.cpp`):

- A single query takes a scalar product a head, written for the oldest instruction set. Two ordinary matrix products
  with one row are twice as fast, but only where nothing is multiplied by a scale inside. So queries come scaled, the
  attribute says 1, and a sink, which these products alone know, asks for them. Its weight is exp(-1e30) = 0.
- Several queries take matrix products, each of which packs its keys and values first. Queries of the heads that share a
  KV head are therefore rows of one product, and not products of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.graphs.builder import CONTRIB_DOMAIN, GraphBuilder

UNSEEN = -1e30  # added to a score of which nothing is to be left


def grouped_query_attention(
    builder: GraphBuilder,
    query: str,
    caches: Sequence[str],
    last_positions: str,
    longest: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    outputs: tuple[str | None, str | None, str | None] = (None, None, None),
    key: str = "",
    value: str = "",
    bias: str = "",
    sink: str = "",
    query_lengths: str = "",
    window: int | None = None,
    causal: bool = True,
) -> tuple[str, ...]:
    """Attention of queries that are scaled already, and both caches.

    Args:
        query: [B, S, num_heads * H], or packed with keys and values where `key` and `value` are left out.
        caches: keys and values [B, K, C, H]; `outputs` has the names that they leave under.
        last_positions: int32 [B]; `longest` int32 [1] is an upper bound of what rows hold afterwards.
        window: the query's own position is counted, since ONNX Runtime 1.23.
    """
    inputs = [query, key, value, *caches, last_positions, longest, "", "", "", bias, sink, "", "", "", ""]
    inputs.append(query_lengths)
    while not inputs[-1]:
        inputs.pop()
    attributes: dict[str, int | float] = {} if window is None else {"local_window_size": window}
    if not causal:
        attributes["causal"] = 0
    return builder.multi_op(
        "GroupQueryAttention",
        *inputs,
        outputs=outputs,
        domain=CONTRIB_DOMAIN,
        num_heads=num_heads,
        kv_num_heads=num_kv_heads,
        scale=1.0,
        **attributes,
    )


def no_sink(builder: GraphBuilder, num_heads: int) -> str:
    """Takes part in the softmax of every head with the weight 0."""
    return builder.constant(np.full(num_heads, UNSEEN, np.float32))


def scaled_queries(builder: GraphBuilder, spec: DecoderSpec, layer: int, query_key: str) -> str:
    """[T, (N + K) * H] with its queries multiplied by the layer's scale."""
    shape, scale = spec.shape_of(layer), spec.score_scale_of(layer)
    if scale == 1:
        return query_key
    scales = np.ones((spec.num_heads + shape.num_kv_heads) * shape.head_dim, np.float32)
    scales[: spec.num_heads * shape.head_dim] = scale
    return builder.op("Mul", query_key, builder.constant(scales))
