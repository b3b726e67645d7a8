"""`gqa`: causal attention of packed tokens by `com.microsoft.GroupQueryAttention`, in place, for ONNX Runtime.

The operator takes right-padded queries (`query_seqlens`), appends the valid keys and values at each row's own length
and attends over the row's live positions only. Rows without tokens say query length 0: their cache is not touched.

Rows that decode take the form for single tokens (see `grouped_query`), which is no slower for a few. Where a row has
several, contexts are long and at least three heads share a KV head, it is their heads that are folded. Chunks of
prompts, and layers with a window, take the operator's own form; all rows do where sums may not depend on the schedule.

Shape letters: `T` packed tokens, `B` rows and `S` padded query length of a group, `N`/`K` query/KV heads, `G` query
heads of a KV head, `H` head dim, `J` positions of the longest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from onnx import TensorProto

from dspark_trt.checkpoints.spec import DecoderSpec, LayerShape
from dspark_trt.contract import bindings
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.graphs.builder import Branch, GraphBuilder
from dspark_trt.graphs.grouped_query import UNSEEN, grouped_query_attention, no_sink, scaled_queries
from dspark_trt.graphs.limits import window_in_rows

# Folding pays from here on (docs/adr/0015)
MIN_FOLDED_HEADS = 3  # of a KV head
MIN_FOLDED_POSITIONS = 256  # of the longest row


class GqaAttention:
    """One attention call per row group and layer."""

    def __init__(
        self,
        builder: GraphBuilder,
        spec: DecoderSpec,
        limits: EngineLimits,
        groups: Iterable[str],
        *,
        is_same_in_any_step: bool = False,
    ) -> None:
        """is_same_in_any_step: a row's sums do not depend on what else is in the step."""
        self._builder = builder
        self._spec = spec
        self._is_same_in_any_step = is_same_in_any_step
        self._windows = [window_in_rows(spec, layer, limits) for layer in range(spec.num_layers)]
        whole = [spec.shape_of(layer) for layer in range(spec.num_layers) if not self._is_own(layer)]
        self._groups = [_Group(builder, spec, limits, group, whole) for group in groups]

    def attend(self, layer: int, query_key: str, value: str) -> str:
        builder, window, is_own = self._builder, self._windows[layer], self._is_own(layer)
        scaled = scaled_queries(builder, self._spec, layer, query_key)
        packed = builder.op("Concat", scaled, value, axis=1)  # one gather a group instead of three
        outputs = [group.attend(layer, packed, window, is_own=is_own) for group in self._groups]
        slots = builder.op("Concat", *outputs, axis=0) if len(outputs) > 1 else outputs[0]
        return builder.op("Gather", slots, bindings.PADDED_INDICES, axis=0)

    def _is_own(self, layer: int) -> bool:
        """Whether every group takes the operator's own form."""
        return self._is_same_in_any_step or self._windows[layer] is not None


class _Group:
    """Inputs of one row group, the int32 forms that the operator wants, and its calls."""

    def __init__(
        self, builder: GraphBuilder, spec: DecoderSpec, limits: EngineLimits, group: str, shapes: Iterable[LayerShape]
    ) -> None:
        """`shapes` of the layers that take other forms than the operator's own."""
        self._builder = builder
        self._spec = spec
        self._group = group
        self._tokens = bindings.group_tokens(group)
        past, query = bindings.group_past_lengths(group), bindings.group_query_lengths(group)
        self._folds: dict[int, _Fold] = {}
        with builder.scope(group):
            # a row without tokens counts as one of length 1, the shortest that the operator accepts
            lengths = builder.op("Max", builder.op("Add", past, query), builder.vector(1))
            self._last_positions = _int32(builder, builder.op("Sub", lengths, builder.vector(1)))
            self._query_lengths = _int32(builder, query)
            padded_length = builder.op("Shape", self._tokens, start=1)
            self._longest = _longest(builder, lengths, padded_length)
            self._is_single = _is_one(builder, padded_length)
            if group == bindings.DECODE:
                counts = {spec.num_heads // shape.num_kv_heads for shape in shapes}
                for count in sorted(count for count in counts if count >= MIN_FOLDED_HEADS):
                    self._folds[count] = _Fold(builder, count, limits, past, query, padded_length)

    def attend(self, layer: int, packed: str, window: int | None, *, is_own: bool) -> str:
        """[T, (N + 2 K) * H] -> [B * S, N * H]"""
        builder, shape = self._builder, self._spec.shape_of(layer)
        padded = builder.op("Gather", packed, self._tokens, axis=0)
        caches = bindings.key_cache(self._group, layer), bindings.value_cache(self._group, layer)
        outputs = None, bindings.cache_output(caches[0]), bindings.cache_output(caches[1])
        fold = self._folds.get(self._spec.num_heads // shape.num_kv_heads)
        if is_own or self._group == bindings.PREFILL:
            attended, _, _ = self._call(padded, caches, shape, outputs=outputs, window=window)
        elif self._group == bindings.DECODE and fold is None:
            attended, _, _ = self._call(padded, caches, shape, outputs=outputs, is_single=True)
        else:
            with builder.branch() as nodes:
                single: Branch = nodes, self._call(padded, caches, shape, is_single=True)
            with builder.branch() as nodes:
                several: Branch = (
                    nodes,
                    self._call(padded, caches, shape) if fold is None else fold.call(padded, caches, self._spec, shape),
                )
            attended, _, _ = builder.choose(
                self._is_single if fold is None else fold.is_left_out,
                single,
                several,
                element_type="float32",
                outputs=outputs,
            )
        return builder.op("Reshape", attended, builder.vector(-1, self._spec.num_heads * shape.head_dim))

    def _call(
        self,
        padded: str,
        caches: Sequence[str],
        shape: LayerShape,
        *,
        outputs: tuple[str | None, str | None, str | None] = (None, None, None),
        window: int | None = None,
        is_single: bool = False,
    ) -> tuple[str, ...]:
        num_heads = self._spec.num_heads
        return grouped_query_attention(
            self._builder,
            padded,
            caches,
            self._last_positions,
            self._longest,
            num_heads=num_heads,
            num_kv_heads=shape.num_kv_heads,
            outputs=outputs,
            sink=no_sink(self._builder, num_heads) if is_single else "",
            query_lengths=self._query_lengths,
            window=window,
        )


class _Fold:
    """The G heads of a KV head as G queries for each token, in the order of tokens.

    The operator writes as many keys as there are queries: those of the tokens, and what stands behind them is never
    valid. It would show query t * G + i of a row the positions up to past + t * G + i; a bias takes away those behind
    the token's own.
    """

    def __init__(
        self, builder: GraphBuilder, count: int, limits: EngineLimits, past: str, query: str, padded_length: str
    ) -> None:
        """`count` G; past and query lengths [B], padded length [1]."""
        self._builder = builder
        self._count = count
        folded_length = builder.op("Mul", padded_length, builder.vector(count))
        folded_query = builder.op("Mul", query, builder.vector(count))
        lengths = builder.op("Max", builder.op("Add", past, folded_query), builder.vector(1))
        is_shallow = builder.op("Less", builder.op("ReduceMax", past), builder.vector(MIN_FOLDED_POSITIONS))
        # rows have room for max_batch_tokens behind the last position
        is_long = builder.op("Greater", folded_length, builder.vector(limits.max_batch_tokens))
        is_single = builder.op("Equal", padded_length, builder.vector(1))
        is_left_out = builder.op("Or", builder.op("Or", is_single, is_shallow), is_long)
        self.is_left_out = builder.op("Squeeze", is_left_out, builder.vector(0))
        self._last_positions = _int32(builder, builder.op("Sub", lengths, builder.vector(1)))
        self._query_lengths = _int32(builder, folded_query)
        self._longest = _longest(builder, lengths, folded_length)
        with builder.branch() as nodes:
            nothing: Branch = nodes, (builder.op("Identity", builder.constant(np.zeros((1, 1, 1, 1), np.float32))),)
        with builder.branch() as nodes:
            bias: Branch = nodes, (self._make_bias(past, folded_length),)
        (self._bias,) = builder.choose(self.is_left_out, nothing, bias, element_type="float32", outputs=(None,))

    def _make_bias(self, past: str, folded_length: str) -> str:
        """[B, 1, S * G, J]"""
        builder = self._builder
        zero, one = builder.scalar(0), builder.scalar(1)
        queries = builder.op("Range", zero, builder.op("Squeeze", folded_length, builder.vector(0)), one)
        tokens = builder.op("Div", queries, builder.scalar(self._count))
        last_seen = builder.op("Add", builder.op("Unsqueeze", past, builder.vector(1)), tokens)  # [B, S * G]
        longest = builder.op("Cast", builder.op("Squeeze", self._longest, builder.vector(0)), to=TensorProto.INT64)
        positions = builder.op("Range", zero, longest, one)
        is_seen = builder.op("LessOrEqual", positions, builder.op("Unsqueeze", last_seen, builder.vector(1, 3)))
        floats = (builder.constant(np.array(value, np.float32)) for value in (0, UNSEEN))
        return builder.op("Where", is_seen, *floats)

    def call(self, padded: str, caches: Sequence[str], spec: DecoderSpec, shape: LayerShape) -> tuple[str, ...]:
        """[B, S, (N + 2 K) * H] -> [B, S, K, G, H], and both caches."""
        builder, count, num_kv_heads, head_dim = self._builder, self._count, shape.num_kv_heads, shape.head_dim
        width = num_kv_heads * head_dim
        sizes = builder.vector(count * width, width, width)
        query, key, value = builder.multi_op("Split", padded, sizes, axis=2, outputs=(None,) * 3)
        heads = builder.op("Reshape", query, builder.vector(0, 0, num_kv_heads, count, head_dim))
        turned = builder.op("Transpose", heads, perm=[0, 1, 3, 2, 4])
        attended, *written = grouped_query_attention(
            builder,
            builder.op("Reshape", turned, builder.vector(0, -1, width)),
            caches,
            self._last_positions,
            self._longest,
            num_heads=num_kv_heads,
            num_kv_heads=num_kv_heads,
            key=builder.op("Concat", *[key] * count, axis=1),
            value=builder.op("Concat", *[value] * count, axis=1),
            bias=self._bias,
            sink=no_sink(builder, num_kv_heads),
            query_lengths=self._query_lengths,
        )
        slots = builder.op("Reshape", attended, builder.vector(0, -1, count, num_kv_heads, head_dim))
        return builder.op("Transpose", slots, perm=[0, 1, 3, 2, 4]), *written


def _int32(builder: GraphBuilder, value: str) -> str:
    return builder.op("Cast", value, to=TensorProto.INT32)


def _longest(builder: GraphBuilder, lengths: str, padded_length: str) -> str:
    """The operator accepts no upper bound below the padded length."""
    bounds = builder.op("Concat", lengths, padded_length, axis=0)
    return _int32(builder, builder.op("ReduceMax", bounds, builder.vector(0)))


def _is_one(builder: GraphBuilder, length: str) -> str:
    return builder.op("Squeeze", builder.op("Equal", length, builder.vector(1)), builder.vector(0))
