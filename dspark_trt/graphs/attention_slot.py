"""Attention of drafters that draft one slot after the other: each slot is a query of one token a request.

A slot's keys and values are written behind those of the slots before it, all in one graph: the cache that one slot has
written is the cache that the next one reads, the same memory under another name. Nothing valid stands behind the
context, and the next ingest overwrites it.

Shape letters: `R` requests, `B` rows of the bound range, `N`/`K` query/KV heads, `H` head dim.
"""

from __future__ import annotations

from onnx import TensorProto

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.contract import bindings
from dspark_trt.graphs.builder import CONTRIB_DOMAIN, GraphBuilder
from dspark_trt.graphs.rotary import split_query_key

_NUM_UNUSED_INPUTS = 9  # cos_cache .. k_norm_weight, between total_sequence_length and query_seqlens


class GqaSlotAttention:
    """`drafter`: `com.microsoft.GroupQueryAttention`, in place, one call for each slot and layer."""

    def __init__(self, builder: GraphBuilder, spec: DecoderSpec, *, slot: int, num_slots: int, positions: str) -> None:
        """`positions` [R] of the slot's tokens."""
        self._builder = builder
        self._spec = spec
        self._slot, self._num_slots = slot, num_slots
        with builder.scope("rows"):
            last = builder.op("Gather", positions, bindings.ROW_REQUESTS)  # [B]
            # a row without request: the operator leaves it alone, and 0 is the last position it accepts in any case
            last = builder.op("Mul", last, bindings.ROW_QUERY_LENGTHS)
            longest = builder.op("Add", builder.op("ReduceMax", last, builder.vector(0)), builder.scalar(1))
            self._last_positions = builder.op("Cast", last, to=TensorProto.INT32)
            self._longest = builder.op("Cast", longest, to=TensorProto.INT32)
            self._query_lengths = builder.op("Cast", bindings.ROW_QUERY_LENGTHS, to=TensorProto.INT32)

    def attend(self, layer: int, query_key: str, value: str) -> str:
        """[R, (N+K)*H], [R, K*H] -> [R, N*H]."""
        builder, spec = self._builder, self._spec
        query, key = split_query_key(builder, spec, query_key)
        names = [
            slot_cache(cache(bindings.CONTEXT, layer), self._slot, self._num_slots)
            for cache in (bindings.key_cache, bindings.value_cache)
        ]
        attended, _, _ = builder.multi_op(
            "GroupQueryAttention",
            *(self._of_rows(x) for x in (query, key, value)),
            *(source for source, _ in names),
            self._last_positions,
            self._longest,
            *[""] * _NUM_UNUSED_INPUTS,
            self._query_lengths,
            outputs=(None, *(output for _, output in names)),
            domain=CONTRIB_DOMAIN,
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
        )
        of_requests = builder.op("Gather", attended, bindings.BLOCK_ROWS, axis=0)
        return builder.op("Reshape", of_requests, builder.vector(-1, spec.num_heads * spec.head_dim))

    def _of_rows(self, x: str) -> str:
        """[R, width] -> [B, 1, width]."""
        rows = self._builder.op("Gather", x, bindings.ROW_REQUESTS, axis=0)
        return self._builder.op("Unsqueeze", rows, self._builder.vector(1))


def slot_cache(cache: str, slot: int, num_slots: int) -> tuple[str, str]:
    """The names under which a slot reads `cache`, and under which it has written it."""
    source = bindings.cache_slot_output(cache, slot - 1) if slot else cache
    is_last = slot == num_slots - 1
    return source, bindings.cache_output(cache) if is_last else bindings.cache_slot_output(cache, slot)
