"""`paged`: attention for TensorRT, over a KV pool of pages that rows share (docs/adr/0017).

New keys and values enter the pool through the node `dspark::PageWrite`, in place; `dspark::RowAttention` attends over
what is live of each row, through block tables. Queries stay packed: chunks of different lengths are one call, and
nothing is padded to the longest of them. Page 0 belongs to nobody, and what padding writes goes there.

A window shorter than a row, or another scale of the scores, has no kernel: there the pages of a row are gathered, and
the operators of `masked_attention` stand in the graph.

Shape letters: `T` packed tokens, `R` requests, `G` positions of a block, `B` rows and `S` padded query length of a
group, `N`/`K` query/KV heads, `H` head dim, `C` row capacity, `W` pages of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.function_body import row_attention_function, row_attention_node

from dspark_trt.checkpoints.spec import BlockAttention, BlockDrafterSpec, DecoderSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims, attends_live
from dspark_trt.graphs.attention_masked import Sinks, masked_attention
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.limits import window_in_rows
from dspark_trt.graphs.paged_rows import (
    PagedRows,
    PageWriter,
    count_to,
    gathered_rows,
    on_device,
    rows_of_groups,
    slots_at,
    slots_of_tokens,
)
from dspark_trt.graphs.rotary import split_query_key

Attend = Callable[[int, str, str], str]  # layer, packed queries [T, N * H], pool as written -> [T, N * H]


class PagedCausalAttention:
    """The target: one attention a layer, for rows that verify and for prompt chunks."""

    def __init__(self, builder: GraphBuilder, spec: DecoderSpec, dims: TargetDims, *, gamma: int) -> None:
        self._builder = builder
        self._spec = spec
        num_layers = range(spec.num_layers)
        with builder.scope("rows"):
            rows = rows_of_groups(builder, bindings.TARGET_GROUPS)
            row_of_token, slots = slots_of_tokens(builder, dims, rows, bindings.POSITIONS)
            self._writer = PageWriter(builder, spec, dims, slots)
            windows = [window_in_rows(spec, layer, dims.limits) for layer in num_layers]
            is_live = [attends_live(spec, layer, dims.limits) for layer in num_layers]
            self._attends: list[Attend] = []
            live = _live_attention(
                builder, spec, dims, rows, num_slots=gamma + 1, num_chunk_slots=dims.limits.max_batch_tokens
            )
            masked = {
                window: _masked_attention(builder, spec, dims, rows, row_of_token, window)
                for window, of_kernel in dict.fromkeys(zip(windows, is_live, strict=True))
                if not of_kernel
            }
            self._attends = [
                live if of_kernel else masked[window] for window, of_kernel in zip(windows, is_live, strict=True)
            ]

    def attend(self, layer: int, query_key: str, value: str) -> str:
        query, key = split_query_key(self._builder, self._spec, layer, query_key)
        return self._attends[layer](layer, query, self._writer.write(layer, key, value))


class PagedBlockAttention:
    """Draft blocks: what a layer's queries see is `spec.attention_of(layer)`."""

    def __init__(
        self, builder: GraphBuilder, spec: BlockDrafterSpec, sinks: Sinks, dims: DrafterDims, positions: str
    ) -> None:
        """`positions` [R * G]."""
        self._sinks = sinks
        self._builder = builder
        self._drafter = spec
        length, past = dims.block_length, bindings.PAST_LENGTHS
        with builder.scope("rows"):
            requests = count_to(builder, builder.op("Shape", past))  # [R]
            first = builder.op("Mul", requests, builder.scalar(length))
            places = builder.constant(np.arange(length, dtype=np.int64))
            tokens = builder.op("Add", builder.op("Unsqueeze", first, builder.vector(1)), places)  # [R, G]
            lengths = builder.op("Expand", builder.scalar(length), builder.op("Shape", past))
            tables = bindings.group_block_tables(bindings.CONTEXT)
            rows = PagedRows(first, past, lengths, tables, (tokens,))
            row_of_token = builder.op(
                "Reshape",
                builder.op("Expand", builder.op("Unsqueeze", requests, builder.vector(1)), builder.op("Shape", tokens)),
                builder.vector(-1),
            )
            slots = slots_at(builder, dims, tables, row_of_token, positions)
            self._writer = PageWriter(builder, spec.decoder, dims, slots)
            forms = sorted({spec.attention_of(layer) for layer in range(spec.decoder.num_layers)}, key=str)
            # one body serves all nodes of a graph: where both kinds stand in one, the kernel has the plain blocks
            is_causal = all(form.is_causal for form in forms if _is_live(form))
            self._attends = {
                form: _live_attention(builder, spec.decoder, dims, rows, num_slots=length, is_causal=is_causal)
                if _is_live(form) and form.is_causal == is_causal
                else self._masked(form, dims, tokens)
                for form in forms
            }

    def _masked(self, form: BlockAttention, dims: DrafterDims, tokens: str) -> Attend:
        """`tokens` [R, G]."""
        builder, spec, length = self._builder, self._drafter.decoder, dims.block_length
        past = builder.op("Unsqueeze", bindings.PAST_LENGTHS, builder.vector(1))  # [R, 1]
        places = builder.constant(np.arange(length, dtype=np.int64))
        positions = builder.op("Add", past, places)  # [R, G]
        last_seen = positions
        if not form.is_causal:
            last = builder.op("Add", past, builder.scalar(length - 1))
            last_seen = builder.op("Expand", last, builder.vector(1, length))
        first_seen = None
        if form.window is not None:
            begin = positions if form.window_from == "slot" else past
            reach = form.window - 1 if form.window_from == "slot" else form.window
            first_seen = builder.op("Sub", begin, builder.scalar(reach))
            first_seen = builder.op("Expand", first_seen, builder.vector(1, length))  # [R, G]
        sinks = self._sinks if form.has_sink else None
        attend = masked_attention(builder, spec, dims, first_seen, last_seen, sinks)

        tables = bindings.group_block_tables(bindings.CONTEXT)
        num_live = builder.op("Add", bindings.PAST_LENGTHS, builder.scalar(length))

        def of_packed(layer: int, query: str, pool: str) -> str:
            keys, values = gathered_rows(builder, spec, dims, layer, pool, tables=tables, num_live=num_live)
            attended = attend(layer, _padded(builder, spec, layer, query, tokens), keys, values)
            return _flat(builder, spec, layer, attended)

        return of_packed

    def attend(self, layer: int, query_key: str, value: str) -> str:
        query, key = split_query_key(self._builder, self._drafter.decoder, layer, query_key)
        attend = self._attends[self._drafter.attention_of(layer)]
        return attend(layer, query, self._writer.write(layer, key, value))


def _is_live(form: BlockAttention) -> bool:
    """Whether the kernel does it, but for who sees whom."""
    return form.window is None and not form.has_sink


class PagedContext:
    """Ingest: context tokens of a row group enter the pool."""

    def __init__(self, builder: GraphBuilder, spec: DecoderSpec, dims: DrafterDims) -> None:
        with builder.scope("rows"):
            rows = rows_of_groups(builder, (bindings.CONTEXT,))
            _, slots = slots_of_tokens(builder, dims, rows, bindings.POSITIONS)
        self._writer = PageWriter(builder, spec, dims, slots)

    def append(self, layer: int, key: str, value: str) -> None:
        self._writer.write(layer, key, value)


def _live_attention(
    builder: GraphBuilder,
    spec: DecoderSpec,
    dims: TargetDims | DrafterDims,
    rows: PagedRows,
    *,
    num_slots: int,
    num_chunk_slots: int = 0,
    is_causal: bool = True,
) -> Attend:
    """Nothing behind a row's last query is read."""
    form = RowAttentionForm(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_positions=dims.cache.page_positions,
        table_width=dims.cache.table_width,
        num_slots=num_slots,
        num_chunk_slots=num_chunk_slots,
        is_causal=is_causal,
        element_type=dims.element_type,
    )
    function = row_attention_function(form)

    def attend(layer: int, query: str, pool: str) -> str:
        name = builder.fresh("RowAttention")
        output = f"{name}:0"
        given = [
            query, pool, rows.first_tokens, rows.past_lengths, rows.query_lengths, rows.block_tables, *rows.groups
        ]  # fmt: skip
        builder.node(row_attention_node(form, given, [output], name=name), function)
        return output

    return attend


def _masked_attention(
    builder: GraphBuilder, spec: DecoderSpec, dims: TargetDims, rows: PagedRows, row_of_token: str, window: int | None
) -> Attend:
    """Group by group, padded to the group's longest query."""
    attends, begins, strides = [], [], []
    begin = first_row = builder.vector(0)  # padded queries, and rows, of the groups before
    for group in bindings.TARGET_GROUPS:
        tokens, past = bindings.group_tokens(group), bindings.group_past_lengths(group)
        num_slots = builder.op("Shape", tokens, start=1)  # [1]
        last_seen = builder.op("Add", builder.op("Unsqueeze", past, builder.vector(1)), count_to(builder, num_slots))
        first_seen = None if window is None else builder.op("Sub", last_seen, builder.scalar(window - 1))
        attends.append(masked_attention(builder, spec, dims, first_seen, last_seen))
        stride, num_rows = on_device(builder, num_slots), on_device(builder, builder.op("Shape", past))
        begins.append(builder.op("Sub", begin, builder.op("Mul", first_row, stride)))
        strides.append(stride)
        begin = builder.op("Add", begin, builder.op("Mul", num_rows, stride))
        first_row = builder.op("Add", first_row, num_rows)
    token = count_to(builder, builder.op("Shape", row_of_token))
    num_decoded = builder.op("ReduceSum", bindings.group_query_lengths(bindings.DECODE), builder.vector(0))  # [1]
    is_first = builder.op("Less", token, num_decoded)
    inside = builder.op("Sub", token, builder.op("Gather", rows.first_tokens, row_of_token, axis=0))
    stride = builder.op("Where", is_first, *strides)
    padded_index = builder.op("Add", builder.op("Mul", row_of_token, stride), builder.op("Where", is_first, *begins))
    last = builder.op("Sub", stride, builder.scalar(1))
    padded_index = builder.op("Add", padded_index, builder.op("Min", inside, last))  # [T]
    # padding stands in row 0 wherever it is: what becomes of it is nobody's
    padded_index = builder.op("Max", padded_index, builder.scalar(0))
    num_live = {
        group: builder.op("Add", bindings.group_past_lengths(group), bindings.group_query_lengths(group))
        for group in bindings.TARGET_GROUPS
    }

    def attend(layer: int, query: str, pool: str) -> str:
        outputs = []
        for group, attend_group in zip(bindings.TARGET_GROUPS, attends, strict=True):
            tables = bindings.group_block_tables(group)
            keys, values = gathered_rows(builder, spec, dims, layer, pool, tables=tables, num_live=num_live[group])
            padded = _padded(builder, spec, layer, query, bindings.group_tokens(group))
            outputs.append(_flat(builder, spec, layer, attend_group(layer, padded, keys, values)))
        return builder.op("Gather", builder.op("Concat", *outputs, axis=0), padded_index, axis=0)

    return attend


def _padded(builder: GraphBuilder, spec: DecoderSpec, layer: int, query: str, tokens: str) -> str:
    """[T, N * H] -> [B, N, S, H]."""
    padded = builder.op("Gather", query, tokens, axis=0)
    heads = builder.vector(0, 0, spec.num_heads, spec.shape_of(layer).head_dim)
    return builder.op("Transpose", builder.op("Reshape", padded, heads), perm=[0, 2, 1, 3])


def _flat(builder: GraphBuilder, spec: DecoderSpec, layer: int, attended: str) -> str:
    """[B, N, S, H] -> [B * S, N * H]."""
    slots = builder.op("Transpose", attended, perm=[0, 2, 1, 3])
    return builder.op("Reshape", slots, builder.vector(-1, spec.num_heads * spec.shape_of(layer).head_dim))
