"""`drafter`: attention of the drafter on ONNX Runtime.

The block's keys and values are written behind the context first, where no valid position stands; the next ingest
overwrites them (docs/architecture.md, "Attention"). Where all slots see the same, they are queries of one product.
Where they do not, or heads have sinks, they are folded into the head dimension, and a bias takes away what a slot does
not see.

Shape letters: `R` requests, `G` positions of a block, `B` rows of the bound range, `N`/`K` query/KV heads, `H` head
dim, `T` context tokens, `J` positions of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from dspark_trt.checkpoints.spec import BlockAttention, BlockDrafterSpec, DecoderSpec, LayerShape
from dspark_trt.contract import bindings
from dspark_trt.graphs.attention_masked import Sinks
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.grouped_query import UNSEEN, grouped_query_attention, no_sink, scaled_queries
from dspark_trt.graphs.rotary import split_query_key


class ScatterContext:
    """Writes K and V of T packed context tokens to any rows of the pool, each token's heads in one go."""

    def __init__(
        self, builder: GraphBuilder, spec: DecoderSpec, *, output: Callable[[str], str] = bindings.cache_output
    ) -> None:
        """`output`: the name under which a cache leaves."""
        self._builder = builder
        self._spec = spec
        self._output = output
        rows = builder.op("Unsqueeze", bindings.ROWS, builder.vector(1, 2))  # [T, 1, 1]
        positions = builder.op("Unsqueeze", bindings.POSITIONS, builder.vector(1, 2))
        counts = dict.fromkeys(spec.shape_of(layer).num_kv_heads for layer in range(spec.num_layers))
        self._indices = {count: _head_indices(builder, rows, positions, count) for count in counts}  # [T, K, 3]

    def append(self, layer: int, key: str, value: str) -> None:
        of_layer = self._spec.shape_of(layer)
        shape = self._builder.vector(0, of_layer.num_kv_heads, of_layer.head_dim)
        for x, cache in ((key, bindings.key_cache), (value, bindings.value_cache)):
            name = cache(bindings.CONTEXT, layer)
            heads = self._builder.op("Reshape", x, shape)
            indices = self._indices[of_layer.num_kv_heads]
            self._builder.op("ScatterND", name, indices, heads, output=self._output(name))


class FoldedBlockAttention:
    """Attention of draft blocks: what a layer's slots see is `drafter.attention_of(layer)`."""

    def __init__(
        self, builder: GraphBuilder, drafter: BlockDrafterSpec, sinks: Sinks, *, length: int, positions: str
    ) -> None:
        """`positions` [R * G] of blocks of `length`."""
        self._builder = builder
        self._drafter = drafter
        self._sinks = sinks
        self._spec = spec = drafter.decoder
        self._length = length
        self._no_keys: dict[int, str] = {}
        with builder.scope("rows"):
            rows = builder.op("Unsqueeze", bindings.BLOCK_ROWS, builder.vector(1, 2, 3))
            places = builder.op("Reshape", positions, builder.vector(-1, length, 1, 1))
            counts = dict.fromkeys(spec.shape_of(layer).num_kv_heads for layer in range(spec.num_layers))
            self._indices = {count: _head_indices(builder, rows, places, count) for count in counts}  # [R, G, K, 3]
            past = builder.op("Gather", bindings.PAST_LENGTHS, bindings.ROW_REQUESTS)  # [B]
            last = builder.op("Add", past, builder.scalar(length - 1))
            # a row without request: the operator leaves it alone, and 0 is the last position it accepts in any case
            last = builder.op("Mul", last, bindings.ROW_QUERY_LENGTHS)
            self._last_positions = builder.op("Cast", last, to=TensorProto.INT32)
            self._query_lengths = builder.op("Cast", bindings.ROW_QUERY_LENGTHS, to=TensorProto.INT32)
            longest = builder.op("Add", builder.op("ReduceMax", last, builder.vector(0)), builder.scalar(1))
            self._longest = builder.op("Cast", longest, to=TensorProto.INT32)
            forms = sorted({drafter.attention_of(layer) for layer in range(spec.num_layers)}, key=str)
            limited = [form for form in forms if form.is_causal or form.window is not None]
            self._biases = {form: self._bias(form, past, longest) for form in limited}

    def attend(self, layer: int, query_key: str, value: str) -> str:
        builder, spec = self._builder, self._spec
        shape = spec.shape_of(layer)
        query, key = split_query_key(builder, spec, layer, scaled_queries(builder, spec, layer, query_key))
        caches = tuple(cache(bindings.CONTEXT, layer) for cache in (bindings.key_cache, bindings.value_cache))
        written = [self._write(cache, x, shape) for cache, x in zip(caches, (key, value), strict=True)]
        outputs = (None, bindings.cache_output(caches[0]), bindings.cache_output(caches[1]))
        form = self._drafter.attention_of(layer)
        sink = self._folded_sink(layer)
        if form not in self._biases and not sink:
            return self._attend_alike(query, written, shape, outputs)
        (last_key, last_value) = (self._last_of_rows(x, shape) for x in (key, value))
        attended, _, _ = grouped_query_attention(
            builder,
            self._heads_of_rows(query, shape.head_dim),
            written,
            self._last_positions,
            self._longest,
            num_heads=spec.num_heads * self._length,
            num_kv_heads=shape.num_kv_heads,
            outputs=outputs,
            key=last_key,
            value=last_value,
            bias=self._biases.get(form, ""),
            sink=sink or no_sink(builder, spec.num_heads * self._length),
            query_lengths=self._query_lengths,
        )
        return self._slots_of_heads(attended, shape.head_dim)

    def _attend_alike(
        self, query: str, written: list[str], shape: LayerShape, outputs: tuple[str | None, str, str]
    ) -> str:
        """All slots see the same: those of the heads of a KV head are so many queries of one product.

        To the operator they are a first prompt, which sees keys and values that are there already, in both directions.
        """
        builder, spec, count, head_dim = self._builder, self._spec, shape.num_kv_heads, shape.head_dim
        group, width = spec.num_heads // count, count * head_dim
        slots = builder.op("Reshape", query, builder.vector(-1, self._length, count, group, head_dim))
        turned = builder.op("Transpose", slots, perm=[0, 1, 3, 2, 4])
        queries = builder.op("Reshape", turned, builder.vector(-1, self._length * group, width))
        nothing = self._nothing(width)
        attended, _, _ = grouped_query_attention(
            builder,
            builder.op("Gather", queries, bindings.ROW_REQUESTS, axis=0),
            written,
            self._last_positions,
            builder.constant(np.array([self._length * group], np.int32)),
            num_heads=count,
            num_kv_heads=count,
            outputs=outputs,
            key=nothing,
            value=nothing,
            sink=no_sink(builder, count),
            causal=False,
        )
        blocks = builder.op("Gather", attended, bindings.BLOCK_ROWS, axis=0)
        heads = builder.op("Reshape", blocks, builder.vector(-1, self._length, group, count, head_dim))
        turned = builder.op("Transpose", heads, perm=[0, 1, 3, 2, 4])
        return builder.op("Reshape", turned, builder.vector(-1, spec.num_heads * head_dim))

    def _nothing(self, width: int) -> str:
        """No new key, [B, 0, width]."""
        builder = self._builder
        if width not in self._no_keys:
            shape = builder.op("Concat", builder.op("Shape", bindings.ROW_REQUESTS), builder.vector(0, width), axis=0)
            self._no_keys[width] = builder.op("ConstantOfShape", shape)
        return self._no_keys[width]

    def _folded_sink(self, layer: int) -> str:
        """Sinks of the folded heads [N * G]; empty where the layer has none."""
        builder, sink = self._builder, self._sinks.of(layer)
        if not sink:
            return ""
        column = builder.op("Unsqueeze", sink, builder.vector(1))
        return builder.op("Reshape", builder.op("Expand", column, builder.vector(1, self._length)), builder.vector(-1))

    def _bias(self, form: BlockAttention, past: str, longest: str) -> str:
        """What is added to the scores of every folded head, [B, N * G, 1, J]; `past` [B] positions, `longest` [1]."""
        builder, length = self._builder, self._length
        end = builder.op("Squeeze", longest, builder.vector(0))
        keys = builder.op("Range", builder.scalar(0), end, builder.scalar(1))  # [J]
        begin = builder.op("Unsqueeze", past, builder.vector(1, 2))  # [B, 1, 1]
        slots = builder.op("Add", begin, builder.constant(np.arange(length, dtype=np.int64)[:, None]))  # [B, G, 1]
        latest = slots if form.is_causal else builder.op("Add", begin, builder.scalar(length - 1))
        is_seen = builder.op("LessOrEqual", keys, latest)
        if form.window is not None:
            first = builder.op("Sub", begin, builder.scalar(form.window))
            if form.window_from == "slot":
                first = builder.op("Sub", slots, builder.scalar(form.window - 1))
            is_seen = builder.op("And", is_seen, builder.op("GreaterOrEqual", keys, first))  # [B, G or 1, J]
        unseen = builder.constant(np.array(UNSEEN, np.float32))
        bias = builder.op("Where", is_seen, builder.constant(np.zeros((), np.float32)), unseen)
        heads = builder.vector(1, self._spec.num_heads, length, 1)
        of_heads = builder.op("Expand", builder.op("Unsqueeze", bias, builder.vector(1)), heads)  # [B, N, G, J]
        folded = builder.vector(0, self._spec.num_heads * length, 1, -1)
        return builder.op("Reshape", of_heads, folded)

    def _write(self, cache: str, x: str, shape: LayerShape) -> str:
        """The cache with the whole block [R * G, K * H] behind the context, which was brought up before."""
        builder, count = self._builder, shape.num_kv_heads
        heads = builder.op("Reshape", x, builder.vector(-1, self._length, count, shape.head_dim))
        context = bindings.cache_context_output(cache)
        return builder.op("ScatterND", context, self._indices[count], heads, output=bindings.cache_block_output(cache))

    def _last_of_rows(self, x: str, shape: LayerShape) -> str:
        """The last slot alone, [R * G, K * H] -> [B, 1, K * H].

        The operator has to be given at least one new position: it gets the last slot, which it writes a second time.
        """
        builder = self._builder
        slots = builder.op("Reshape", x, builder.vector(-1, self._length, shape.num_kv_heads * shape.head_dim))
        last = builder.op("Gather", slots, builder.vector(self._length - 1), axis=1)
        return builder.op("Gather", last, bindings.ROW_REQUESTS, axis=0)

    def _heads_of_rows(self, query: str, head_dim: int) -> str:
        """[R * G, N * H] -> [B, 1, N * G * H]."""
        builder, spec = self._builder, self._spec
        slots = builder.op("Reshape", query, builder.vector(-1, self._length, spec.num_heads, head_dim))
        heads = builder.op("Transpose", slots, perm=[0, 2, 1, 3])
        folded = builder.op("Reshape", heads, builder.vector(0, 1, spec.num_heads * self._length * head_dim))
        return builder.op("Gather", folded, bindings.ROW_REQUESTS, axis=0)

    def _slots_of_heads(self, attended: str, head_dim: int) -> str:
        """[B, 1, N * G * H] -> [R * G, N * H]."""
        builder, spec = self._builder, self._spec
        blocks = builder.op("Gather", attended, bindings.BLOCK_ROWS, axis=0)
        heads = builder.op("Reshape", blocks, builder.vector(0, spec.num_heads, self._length, head_dim))
        slots = builder.op("Transpose", heads, perm=[0, 2, 1, 3])
        return builder.op("Reshape", slots, builder.vector(-1, spec.num_heads * head_dim))


def _head_indices(builder: GraphBuilder, rows: str, positions: str, num_kv_heads: int) -> str:
    """Indices (row, head, position) into a cache for every head; rows and positions have shape [..., 1, 1]."""
    heads = np.zeros((num_kv_heads, 3), np.int64)
    heads[:, 1] = np.arange(num_kv_heads)
    row_part = builder.op("Mul", rows, builder.vector(1, 0, 0))
    position_part = builder.op("Mul", positions, builder.vector(0, 0, 1))
    return builder.op("Add", builder.op("Add", row_part, position_part), builder.constant(heads))
