"""Attention of drafters that draft one slot after the other, on ONNX Runtime: each slot is a query of one token a
request.

A slot sees the context before the first slot, the slots before it and itself. Nothing of a call for drafts is valid
afterwards: the next ingest writes these positions.

Shape letters: `R` requests, `B` rows of the bound range, `N`/`K` query/KV heads, `H` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.contract import bindings
from dspark_trt.graphs.builder import CONTRIB_DOMAIN, GraphBuilder
from dspark_trt.graphs.rotary import split_query_key

_NUM_UNUSED_INPUTS = 9  # cos_cache .. k_norm_weight, between total_sequence_length and query_seqlens


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
        query, key = split_query_key(builder, spec, layer, query_key)
        names = [self._names(cache(bindings.CONTEXT, layer)) for cache in (bindings.key_cache, bindings.value_cache)]
        attended, _, _ = builder.multi_op(
            "GroupQueryAttention",
            *(builder.op("Unsqueeze", _of_rows(builder, x), builder.vector(1)) for x in (query, key, value)),
            *(source for source, _ in names),
            self.last_positions,
            self.longest,
            *[""] * _NUM_UNUSED_INPUTS,
            self.query_lengths,
            outputs=(None, *(output for _, output in names)),
            domain=CONTRIB_DOMAIN,
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
        )
        return _of_requests(builder, spec, attended)

    def _names(self, cache: str) -> tuple[str, str]:
        """Under which the slot reads `cache`, and under which it has written it."""
        source = bindings.cache_slot_output(cache, self.slot - 1) if self.slot else cache
        is_last = self.slot == self.num_slots - 1
        return source, bindings.cache_output(cache) if is_last else bindings.cache_slot_output(cache, self.slot)


def _of_rows(builder: GraphBuilder, x: str) -> str:
    """[R, width] -> [B, width]."""
    return builder.op("Gather", x, bindings.ROW_REQUESTS, axis=0)


def _of_requests(builder: GraphBuilder, spec: DecoderSpec, attended: str) -> str:
    """[B, ...] -> [R, N * H]."""
    of_requests = builder.op("Gather", attended, bindings.BLOCK_ROWS, axis=0)
    return builder.op("Reshape", of_requests, builder.vector(-1, spec.num_heads * spec.head_dim))
