"""`gqa`: causal attention of packed tokens by `com.microsoft.GroupQueryAttention`, in place, for ONNX Runtime.

The operator takes right-padded queries (`query_seqlens`), appends the valid keys and values at each row's own length
and attends over the row's live positions only. Rows without tokens say query length 0: their cache is not touched.

Shape letters: `T` packed tokens, `B` rows and `S` padded query length of a group, `N`/`K` query/KV heads, `H` head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import TensorProto

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.graphs.builder import CONTRIB_DOMAIN, GraphBuilder
from dspark_trt.graphs.limits import window_in_rows

_NUM_UNUSED_INPUTS = 9  # cos_cache .. k_norm_weight, between total_sequence_length and query_seqlens


class GqaAttention:
    """One attention call per row group and layer."""

    def __init__(self, builder: GraphBuilder, spec: DecoderSpec, limits: EngineLimits, groups: Iterable[str]) -> None:
        self._builder = builder
        self._spec = spec
        self._windows = [window_in_rows(spec, layer, limits) for layer in range(spec.num_layers)]
        self._groups = [_Group(builder, group) for group in groups]

    def attend(self, layer: int, query_key: str, value: str) -> str:
        builder, spec = self._builder, self._spec
        shape, window = spec.shape_of(layer), self._windows[layer]
        packed = builder.op("Concat", query_key, value, axis=1)  # one gather a group instead of three
        outputs = []
        for group in self._groups:
            keys, values = group.caches(layer)
            attended, _, _ = builder.multi_op(
                "GroupQueryAttention",
                builder.op("Gather", packed, group.tokens, axis=0),
                "",
                "",
                keys,
                values,
                group.last_positions,
                group.longest,
                *[""] * _NUM_UNUSED_INPUTS,
                group.query_lengths,
                outputs=(None, bindings.cache_output(keys), bindings.cache_output(values)),
                domain=CONTRIB_DOMAIN,
                num_heads=spec.num_heads,
                kv_num_heads=shape.num_kv_heads,
                **score_attributes(spec, layer, window),
            )
            outputs.append(builder.op("Reshape", attended, builder.vector(-1, spec.num_heads * shape.head_dim)))
        slots = builder.op("Concat", *outputs, axis=0) if len(outputs) > 1 else outputs[0]
        return builder.op("Gather", slots, bindings.PADDED_INDICES, axis=0)


def score_attributes(spec: DecoderSpec, layer: int, window: int | None = None) -> dict[str, int | float]:
    """Attributes of the operator beside the numbers of heads, where they are not its defaults."""
    attributes: dict[str, int | float] = {}
    if spec.gemma is not None:
        attributes["scale"] = spec.score_scale_of(layer)
    if window is not None:
        attributes["local_window_size"] = window  # the query's own position is counted, since ONNX Runtime 1.23
    return attributes


class _Group:
    """Inputs of one row group, and the int32 forms that the operator wants."""

    def __init__(self, builder: GraphBuilder, group: str) -> None:
        self._group = group
        self.tokens = bindings.group_tokens(group)
        past, query = bindings.group_past_lengths(group), bindings.group_query_lengths(group)
        with builder.scope(group):
            # a row without tokens counts as one of length 1, the shortest that the operator accepts
            lengths = builder.op("Max", builder.op("Add", past, query), builder.vector(1))
            self.last_positions = _int32(builder, builder.op("Sub", lengths, builder.vector(1)))
            self.query_lengths = _int32(builder, query)
            padded_length = builder.op("Shape", self.tokens, start=1)
            bounds = builder.op("Concat", lengths, padded_length, axis=0)
            self.longest = _int32(builder, builder.op("ReduceMax", bounds, builder.vector(0)))

    def caches(self, layer: int) -> tuple[str, str]:
        return bindings.key_cache(self._group, layer), bindings.value_cache(self._group, layer)


def _int32(builder: GraphBuilder, value: str) -> str:
    return builder.op("Cast", value, to=TensorProto.INT32)
