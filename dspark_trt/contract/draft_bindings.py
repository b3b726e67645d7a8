"""Inputs and outputs of the draft graph of every family but language models. Letters and types as in `bindings`.

| input | type, shape | meaning |
|---|---|---|
| taps, positions, rows | as of ingest | where the graph ingests (`DrafterDims`); rows within the range, T may be 0 |
| anchor_ids | int64 [R] | |
| temperatures, uniforms | float32 [R], [R, G] | |
| past_lengths | int64 [R] | this and what follows, but for row_states: where there are caches |
| block_rows | int64 [R] | the request's row within the range |
| row_requests | int64 [B] | the request of each row of the range; any for a row without request |
| row_query_lengths | int64 [B] | 1 for a row with a request, 0 for one without |
| context.block_tables | int64 [R, W] | with pages, instead of the three above; zeros for padding |
| row_states | float [R, X] | where rows have a state: that of the row's last ingested position |

| output | type, shape |
|---|---|
| draft_ids | int64 [R, G] |
| draft_logits | float32 [R, G, W] |
| confidence_logits | float32 [R, G]; without a confidence head the margin between the two largest draft logits |
| {cache}.context | the same memory once more, between ingesting and writing the block, where the graph ingests |
| {cache}.block | `drafter` attention: the same memory once more, between writing the block and attending |
| {cache}.slot_{j} | the same instead of it, after each slot but the last, where slots are drafted in turn |
| last_states | float [R, X]: where a call makes one slot, the state that the next slot starts from |

Where slots are drafted in turn with `standard` attention, a call of the draft graph makes one slot (G = 1 above): the
next call takes its draft for the anchor, last_states for row_states, and one position more for past_lengths.
"""

from __future__ import annotations

from dspark_trt.contract import bindings
from dspark_trt.contract.bindings import (
    Binding,
    cache_block_output,
    cache_context_output,
    cache_output,
    cache_slot_output,
    caches,
    group_block_tables,
    ingest_inputs,
    row_states,
)
from dspark_trt.contract.dims import DrafterDims


def block_inputs(dims: DrafterDims) -> tuple[Binding, ...]:
    """What there is to say of the blocks of gamma drafts, whatever a family's graph reads of it."""
    return (*_draws(dims.gamma), *_rows_of_blocks())


def _draws(num_slots: int) -> tuple[Binding, ...]:
    return (
        Binding(bindings.ANCHOR_IDS, "int64", ("R",)),
        Binding(bindings.TEMPERATURES, "float32", ("R",)),
        Binding(bindings.UNIFORMS, "float32", ("R", num_slots)),
    )


def _rows_of_blocks() -> tuple[Binding, ...]:
    return (
        Binding(bindings.PAST_LENGTHS, "int64", ("R",)),
        Binding(bindings.BLOCK_ROWS, "int64", ("R",)),
        Binding(bindings.ROW_REQUESTS, "int64", (f"B_{bindings.CONTEXT}",)),
        Binding(bindings.ROW_QUERY_LENGTHS, "int64", (f"B_{bindings.CONTEXT}",)),
    )


def _where(dims: DrafterDims) -> tuple[Binding, ...]:
    if dims.cache.page_positions:
        tables = Binding(group_block_tables(bindings.CONTEXT), "int64", ("R", dims.cache.table_width))
        return (Binding(bindings.PAST_LENGTHS, "int64", ("R",)), tables)
    return _rows_of_blocks() if dims.cache.num_layers else ()


def draft_inputs(dims: DrafterDims) -> tuple[Binding, ...]:
    context = {bindings.TAPS, bindings.POSITIONS, bindings.ROWS} if dims.ingests_in_draft else set[str]()
    return (
        *(binding for binding in ingest_inputs(dims) if binding.name in context),
        *_draws(dims.slots_of_call),
        *_where(dims),
        *row_states(bindings.ROW_STATES, dims),
        *caches(bindings.CONTEXT, dims),
    )


def draft_cache_outputs(cache: str, dims: DrafterDims) -> tuple[str, ...]:
    """Every output of a draft graph that is the memory of `cache`."""
    if dims.has_masks and dims.attention == "standard":
        return ()  # slots stay in the graph, which only reads the caches
    if dims.is_sequential and not dims.is_slot_by_slot:
        return (cache_output(cache), *(cache_slot_output(cache, slot) for slot in range(dims.gamma - 1)))
    context = (cache_context_output(cache),) if dims.ingests_in_draft else ()
    return (cache_output(cache), *context, *((cache_block_output(cache),) if dims.attention == "drafter" else ()))


def drafts(dims: DrafterDims, num_slots: int) -> tuple[Binding, ...]:
    """Of num_slots of each request."""
    return (
        Binding(bindings.DRAFT_IDS, "int64", ("R", num_slots)),
        Binding(bindings.DRAFT_LOGITS, "float32", ("R", num_slots, dims.vocab_size)),
        Binding(bindings.CONFIDENCE_LOGITS, "float32", ("R", num_slots)),
    )


def draft_outputs(dims: DrafterDims) -> tuple[Binding, ...]:
    return (
        *drafts(dims, dims.slots_of_call),
        *(row_states(bindings.LAST_STATES, dims) if dims.is_slot_by_slot else ()),
        *(
            Binding(output, cache.element_type, cache.shape)
            for cache in caches(bindings.CONTEXT, dims)
            for output in draft_cache_outputs(cache.name, dims)
        ),
    )
