"""Attention of drafters that draft one slot after the other: each slot is a query of one token a request.

A slot sees the context before the first slot, the slots before it and itself. Nothing of a call for drafts is valid
afterwards: the next ingest writes these positions.

Shape letters: `R` requests, `B` rows of the bound range, `N`/`K` query/KV heads, `Q` query heads of a KV head, `H` head
dim, `C` row capacity, `J` slots so far.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.drafter_form import LOWEST
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.grouped_query import grouped_query_attention, no_sink, scaled_queries
from dspark_trt.graphs.numbers import NUMPY_TYPES
from dspark_trt.graphs.rotary import split_query_key


class GqaSlots:
    """`drafter`: `com.microsoft.GroupQueryAttention`, in place, one call for each slot and layer.

    The cache that one slot has written is the one that the next slot reads: the same memory under another name.
    """

    def __init__(self, builder: GraphBuilder, spec: DecoderSpec, *, num_slots: int) -> None:
        self._builder = builder
        self._spec = spec
        self._num_slots = num_slots

    def at(self, slot: int, positions: str) -> _GqaSlot:
        """`positions` [R] of the slot's tokens."""
        builder = self._builder
        with builder.scope("rows"):
            last = builder.op("Gather", positions, bindings.ROW_REQUESTS)  # [B]
            # a row without request: the operator leaves it alone, and 0 is the last position it accepts in any case
            last = builder.op("Mul", last, bindings.ROW_QUERY_LENGTHS)
            longest = builder.op("Add", builder.op("ReduceMax", last, builder.vector(0)), builder.scalar(1))
            return _GqaSlot(
                builder,
                self._spec,
                slot,
                self._num_slots,
                last_positions=builder.op("Cast", last, to=TensorProto.INT32),
                longest=builder.op("Cast", longest, to=TensorProto.INT32),
                query_lengths=builder.op("Cast", bindings.ROW_QUERY_LENGTHS, to=TensorProto.INT32),
            )


@dataclass(frozen=True, slots=True)
class _GqaSlot:
    builder: GraphBuilder
    spec: DecoderSpec
    slot: int
    num_slots: int
    last_positions: str  # int32 [B]
    longest: str  # int32 [1]
    query_lengths: str  # int32 [B]

    def attend(self, layer: int, query_key: str, value: str) -> str:
        """[R, (N+K)*H], [R, K*H] -> [R, N*H]."""
        builder, spec = self.builder, self.spec
        query, key = split_query_key(builder, spec, layer, scaled_queries(builder, spec, layer, query_key))
        names = [self._names(cache(bindings.CONTEXT, layer)) for cache in (bindings.key_cache, bindings.value_cache)]
        query, key, value = (
            builder.op("Unsqueeze", _of_rows(builder, x), builder.vector(1)) for x in (query, key, value)
        )
        attended, _, _ = grouped_query_attention(
            builder,
            query,
            [source for source, _ in names],
            self.last_positions,
            self.longest,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            outputs=(None, names[0][1], names[1][1]),
            key=key,
            value=value,
            sink=no_sink(builder, spec.num_heads),
            query_lengths=self.query_lengths,
        )
        return _of_requests(builder, spec, attended)

    def _names(self, cache: str) -> tuple[str, str]:
        """Under which the slot reads `cache`, and under which it has written it."""
        source = bindings.cache_slot_output(cache, self.slot - 1) if self.slot else cache
        is_last = self.slot == self.num_slots - 1
        return source, bindings.cache_output(cache) if is_last else bindings.cache_slot_output(cache, self.slot)


class UnwrittenSlots:
    """`standard`, all slots in one graph, where none waits for a draft: keys and values of the slots stay in the graph,
    and the caches are only read.

    TensorRT updates a cache once in a graph. Scores over the cache, under a mask, and over the slots stand side by side
    in one softmax; the cost follows the capacity of a row.
    """

    def __init__(self, builder: GraphBuilder, spec: DecoderSpec, dims: DrafterDims) -> None:
        self._builder = builder
        self._spec = spec
        self._dims = dims
        self._slots: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)  # keys and values by layer
        self._is_context = ""  # [B, 1, 1, C]

    def at(self, slot: int, positions: str) -> UnwrittenSlots:
        """`positions` [R] of the slot's tokens; slots come in their order."""
        if not self._is_context:
            builder = self._builder
            with builder.scope("rows"):
                begin = builder.op("Gather", positions, bindings.ROW_REQUESTS)
                begin = builder.op("Mul", begin, bindings.ROW_QUERY_LENGTHS)  # a row without request sees no context
                columns = builder.constant(np.arange(self._dims.cache.capacity, dtype=np.int64))
                is_context = builder.op("Less", columns, builder.op("Unsqueeze", begin, builder.vector(1)))  # [B, C]
                self._is_context = builder.op("Unsqueeze", is_context, builder.vector(1, 2))
        return self

    def attend(self, layer: int, query_key: str, value: str) -> str:
        """[R, (N+K)*H], [R, K*H] -> [R, N*H]."""
        builder, spec, dims = self._builder, self._spec, self._dims
        query, key = split_query_key(builder, spec, layer, query_key)
        slots = self._slots[layer]
        slots.append((self._heads(key, 1), self._heads(value, 1)))
        keys, values = (builder.op("Concat", *(slot[which] for slot in slots), axis=2) for which in (0, 1))
        scale = self._constant(spec.score_scale_of(layer))
        queries = builder.op("Mul", self._heads(query, spec.num_heads // spec.num_kv_heads), scale)  # [B, K, Q, H]
        of_context = self._scores(queries, bindings.key_cache(bindings.CONTEXT, layer))
        of_context = builder.op("Where", self._is_context, of_context, self._constant(LOWEST[dims.element_type]))
        scores = builder.op("Concat", of_context, self._scores(queries, keys), axis=3)  # [B, K, Q, C + J]
        weights = builder.op("Softmax", scores, axis=-1)
        parts = builder.vector(dims.cache.capacity, len(slots))
        on_context, on_slots = builder.multi_op("Split", weights, parts, axis=3, outputs=(None, None))
        attended = builder.op(
            "Add",
            builder.op("MatMul", on_context, bindings.value_cache(bindings.CONTEXT, layer)),
            builder.op("MatMul", on_slots, values),
        )
        return _of_requests(builder, spec, attended)

    def _heads(self, x: str, num_heads: int) -> str:
        """[R, K * num_heads * H] -> [B, K, num_heads, H]."""
        shape = self._builder.vector(0, self._spec.num_kv_heads, num_heads, self._spec.head_dim)
        return self._builder.op("Reshape", _of_rows(self._builder, x), shape)

    def _scores(self, queries: str, keys: str) -> str:
        return self._builder.op("MatMul", queries, self._builder.op("Transpose", keys, perm=[0, 1, 3, 2]))

    def _constant(self, value: float) -> str:
        return self._builder.constant(np.array(value, NUMPY_TYPES[self._dims.element_type]))


def _of_rows(builder: GraphBuilder, x: str) -> str:
    """[R, width] -> [B, width]."""
    return builder.op("Gather", x, bindings.ROW_REQUESTS, axis=0)


def _of_requests(builder: GraphBuilder, spec: DecoderSpec, attended: str) -> str:
    """[B, ...] -> [R, N * H]."""
    of_requests = builder.op("Gather", attended, bindings.BLOCK_ROWS, axis=0)
    return builder.op("Reshape", of_requests, builder.vector(-1, spec.num_heads * spec.head_dim))
