"""`standard` attention of drafters that draft one slot after the other: a graph of one slot, with the cache writes and
attention of `attention_standard`.

Shape letters: `R` requests, `B` rows of the bound range, `N`/`K` query/KV heads, `H` head dim.
"""

from __future__ import annotations

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.graphs.attention_standard import Rows, attend_up_to
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.rotary import split_query_key


class StandardSlots:
    """Slots that are drafted one after the other: a graph of one slot, whose queries are one token a request."""

    def __init__(self, builder: GraphBuilder, spec: DecoderSpec, dims: DrafterDims) -> None:
        assert dims.slots_of_call == 1, "a cache is updated once in a graph"
        self._builder = builder
        self._spec = spec
        self._dims = dims

    def at(self, slot: int, positions: str) -> _StandardSlot:
        return _StandardSlot(self._builder, self._spec, self._dims, positions)


class _StandardSlot:
    """A token at `positions` [R] sees what is before it, and itself."""

    def __init__(self, builder: GraphBuilder, spec: DecoderSpec, dims: DrafterDims, positions: str) -> None:
        self._builder = builder
        self._spec = spec
        with builder.scope("rows"):
            row_past = builder.op("Gather", positions, bindings.ROW_REQUESTS)  # [B]
            # a row without request would read as far as request 0, to no use
            row_past = builder.op("Mul", row_past, bindings.ROW_QUERY_LENGTHS)
            tokens, last_seen = (
                builder.op("Unsqueeze", each, builder.vector(1)) for each in (bindings.ROW_REQUESTS, row_past)
            )  # [B, 1]
            self._attend = attend_up_to(builder, spec, dims, None, last_seen)
            query = bindings.ROW_QUERY_LENGTHS
            self._rows = Rows(builder, spec, dims, bindings.CONTEXT, tokens, row_past, query)

    def attend(self, layer: int, query_key: str, value: str) -> str:
        """[R, (N+K)*H], [R, K*H] -> [R, N*H]."""
        builder, spec = self._builder, self._spec
        query, key = split_query_key(builder, spec, layer, query_key)
        attended = self._rows.attend(layer, query, key, value, self._attend)  # [B, 1, N * H]
        of_requests = builder.op("Gather", attended, bindings.BLOCK_ROWS, axis=0)
        return builder.op("Reshape", of_requests, builder.vector(-1, spec.num_heads * spec.shape_of(layer).head_dim))
