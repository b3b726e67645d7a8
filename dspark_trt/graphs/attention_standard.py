"""`standard`: attention in standard operators, over rows: on ONNX Runtime where its own operators do not take a head
and as a check of them, and on devices for drafters whose context stands in no pages.

TensorScatter writes the padded keys and values into the rows, and Attention works under a mask that is always explicit
(docs/architecture.md, "Attention"). The cost follows the capacity of a row, not its live length.

Rows without tokens are written where no valid position can stand, from max_seq_len on, and with zeros: the mask hides
what is there, but a NaN of another request would get through it (0 * NaN).

Shape letters: `T` packed tokens, `R` requests, `G` positions of a block, `B` rows and `S` padded query length of a
group, `N`/`K` query/KV heads, `H` head dim, `C` row capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_trt.checkpoints.spec import BlockAttention, BlockDrafterSpec, DecoderSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.graphs.attention_masked import Attend, Sinks, masked_attention
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.limits import window_in_rows
from dspark_trt.graphs.numbers import NUMPY_TYPES
from dspark_trt.graphs.rotary import split_query_key


class StandardCausalAttention:
    """Packed tokens of a target, or of a language model that drafts: one attention per row group and layer."""

    def __init__(
        self, builder: GraphBuilder, spec: DecoderSpec, dims: TargetDims | DrafterDims, groups: Sequence[str]
    ) -> None:
        """`groups`: row groups by name."""
        self._builder = builder
        self._spec = spec
        self._groups: list[tuple[Rows, dict[int | None, Attend]]] = []
        self._windows = [window_in_rows(spec, layer, dims.limits) for layer in range(spec.num_layers)]
        for group in groups:
            tokens = bindings.group_tokens(group)
            past, query = bindings.group_past_lengths(group), bindings.group_query_lengths(group)
            with builder.scope(group):
                query_slots = builder.op(
                    "Range",
                    builder.scalar(0),
                    _scalar(builder, builder.op("Shape", tokens, start=1)),
                    builder.scalar(1),
                )
                last_seen = builder.op("Add", builder.op("Unsqueeze", past, builder.vector(1)), query_slots)  # [B, S]
                attends = {
                    window: attend_up_to(builder, spec, dims, window, last_seen)
                    for window in dict.fromkeys(self._windows)
                }
                self._groups.append((Rows(builder, spec, dims, group, tokens, past, query), attends))

    def attend(self, layer: int, query_key: str, value: str) -> str:
        builder, spec = self._builder, self._spec
        query, key = split_query_key(builder, spec, layer, query_key)
        width, outputs = spec.num_heads * spec.shape_of(layer).head_dim, []
        for rows, attends in self._groups:
            attended = rows.attend(layer, query, key, value, attends[self._windows[layer]])  # [B, S, N * H]
            outputs.append(builder.op("Reshape", attended, builder.vector(-1, width)))
        slots = builder.op("Concat", *outputs, axis=0) if len(outputs) > 1 else outputs[0]
        return builder.op("Gather", slots, bindings.PADDED_INDICES, axis=0)


class StandardBlockAttention:
    """Draft blocks: what a layer's queries see is `spec.attention_of(layer)`."""

    def __init__(self, builder: GraphBuilder, spec: BlockDrafterSpec, sinks: Sinks, dims: DrafterDims) -> None:
        self._builder = builder
        self._drafter = spec
        self._sinks = sinks
        self._spec = spec.decoder
        length = dims.block_length
        with builder.scope("rows"):
            slots = builder.constant(np.arange(length, dtype=np.int64))
            row_past = builder.op("Gather", bindings.PAST_LENGTHS, bindings.ROW_REQUESTS)  # [B]
            # a row without a block would read as far as request 0, to no use: its query length is 0, of others 1
            row_past = builder.op("Mul", row_past, bindings.ROW_QUERY_LENGTHS)
            first = builder.op("Mul", bindings.ROW_REQUESTS, builder.scalar(length))
            tokens = builder.op("Add", builder.op("Unsqueeze", first, builder.vector(1)), slots)  # [B, G]
            forms = sorted({spec.attention_of(layer) for layer in range(spec.decoder.num_layers)}, key=str)
            self._attends = {form: self._attend_as(form, dims, row_past, slots) for form in forms}
            query = bindings.ROW_QUERY_LENGTHS
            self._rows = Rows(builder, spec.decoder, dims, bindings.CONTEXT, tokens, row_past, query)

    def _attend_as(self, form: BlockAttention, dims: DrafterDims, row_past: str, slots: str) -> Attend:
        """`row_past` [B] and `slots` [G]."""
        builder, length = self._builder, dims.block_length
        positions = builder.op("Add", builder.op("Unsqueeze", row_past, builder.vector(1)), slots)  # [B, G]
        row_last = builder.op("Add", row_past, builder.scalar(length - 1))
        last_seen = positions
        if not form.is_causal:
            last_seen = builder.op(
                "Expand", builder.op("Unsqueeze", row_last, builder.vector(1)), builder.vector(1, length)
            )
        if form.window is None and not form.has_sink:
            return attend_up_to(builder, self._spec, dims, None, last_seen)
        if form.window is None:
            return masked_attention(builder, self._spec, dims, None, last_seen, self._sinks)
        begin = positions if form.window_from == "slot" else builder.op("Unsqueeze", row_past, builder.vector(1))
        reach = form.window - 1 if form.window_from == "slot" else form.window
        first_seen = builder.op("Sub", begin, builder.scalar(reach))
        first_seen = builder.op("Expand", first_seen, builder.vector(1, length))  # [B, G]
        return masked_attention(builder, self._spec, dims, first_seen, last_seen, self._sinks)

    def attend(self, layer: int, query_key: str, value: str) -> str:
        builder, spec = self._builder, self._spec
        query, key = split_query_key(builder, spec, layer, query_key)
        attended = self._rows.attend(layer, query, key, value, self._attends[self._drafter.attention_of(layer)])
        blocks = builder.op("Gather", attended, bindings.BLOCK_ROWS, axis=0)  # [R, G, N * H]
        return builder.op("Reshape", blocks, builder.vector(-1, spec.num_heads * spec.shape_of(layer).head_dim))


class StandardContext:
    """Ingest: context tokens of a row group enter the cache."""

    def __init__(self, builder: GraphBuilder, spec: DecoderSpec, dims: DrafterDims) -> None:
        group = bindings.CONTEXT
        tokens, past = bindings.group_tokens(group), bindings.group_past_lengths(group)
        self._rows = Rows(builder, spec, dims, group, tokens, past, bindings.group_query_lengths(group))

    def append(self, layer: int, key: str, value: str) -> None:
        self._rows.write(layer, key, value)


class Rows:
    """Padded rows of one group: writing them and attending over them."""

    def __init__(
        self,
        builder: GraphBuilder,
        spec: DecoderSpec,
        dims: TargetDims | DrafterDims,
        group: str,
        tokens: str,
        past_lengths: str,
        query_lengths: str,
    ) -> None:
        """`tokens` [B, S]; `past_lengths` and `query_lengths` [B], where 0 is a row without tokens."""
        self._builder = builder
        self._spec = spec
        self._group = group
        self._tokens = tokens
        is_idle = builder.op("Equal", query_lengths, builder.scalar(0))
        self._begin = builder.op("Where", is_idle, builder.scalar(dims.limits.max_seq_len), past_lengths)
        self._is_idle = builder.op("Unsqueeze", is_idle, builder.vector(1, 2, 3))  # [B, 1, 1, 1]
        self._zero = builder.constant(np.zeros((), NUMPY_TYPES[dims.element_type]))

    def write(self, layer: int, key: str, value: str) -> tuple[str, str]:
        """[T, K * H] each -> the caches [B, K, C, H] that hold them."""
        written, shape = [], self._spec.shape_of(layer)
        for x, cache in ((key, bindings.key_cache), (value, bindings.value_cache)):
            name = cache(self._group, layer)
            padded = self._pad(x, shape.num_kv_heads, shape.head_dim)
            padded = self._builder.op("Where", self._is_idle, self._zero, padded)
            written.append(
                self._builder.op("TensorScatter", name, padded, self._begin, axis=2, output=bindings.cache_output(name))
            )
        return written[0], written[1]

    def attend(self, layer: int, query: str, key: str, value: str, attend: Attend) -> str:
        """[T, ...] -> [B, S, N * H]."""
        keys, values = self.write(layer, key, value)
        num_heads, head_dim = self._spec.num_heads, self._spec.shape_of(layer).head_dim
        attended = attend(layer, self._pad(query, num_heads, head_dim), keys, values)  # [B, N, S, H]
        slots = self._builder.op("Transpose", attended, perm=[0, 2, 1, 3])
        return self._builder.op("Reshape", slots, self._builder.vector(0, 0, num_heads * head_dim))

    def _pad(self, x: str, num_heads: int, head_dim: int) -> str:
        """[T, heads * H] -> [B, heads, S, H]."""
        padded = self._builder.op("Gather", x, self._tokens, axis=0)
        slots = self._builder.op("Reshape", padded, self._builder.vector(0, 0, num_heads, head_dim))
        return self._builder.op("Transpose", slots, perm=[0, 2, 1, 3])


def attend_up_to(
    builder: GraphBuilder, spec: DecoderSpec, dims: TargetDims | DrafterDims, window: int | None, last_seen: str
) -> Attend:
    """Each query sees the positions up to `last_seen` [B, S], the last `window` of them where there is one."""
    first_seen = None if window is None else builder.op("Sub", last_seen, builder.scalar(window - 1))
    return masked_attention(builder, spec, dims, first_seen, last_seen)


def _scalar(builder: GraphBuilder, vector: str) -> str:
    return builder.op("Squeeze", vector, builder.vector(0))
