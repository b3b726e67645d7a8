"""Names, element types and symbolic shapes of every graph input and output. Exporter and engines read them here only.

Shape letters: `R` requests, `G` gamma, `T` packed tokens, `L` logit rows, `V` vocabulary, `D` hidden, `M` tap layers,
`K` KV heads, `C` row capacity, `H` head dim, `X` width of a row state; `B` KV rows and `S` padded query length of one
row group; `P` pages of the pool and `W` pages of a row.

A *row group* is one attention call: a contiguous range of B KV rows with their queries padded to S. The target has two,
`decode` and `prefill`, so that verifying rows are not padded to a prefill chunk; a group without tokens is one row
without tokens, B = S = 1.
`float` is the element type of the graph (`dims`): float32, float16 or bfloat16. States of rows are float32 in a float16
graph.
Caches are bound as that range of the pool, and every cache output is the same memory as its input.
Three graphs have modules of their own: `draft_bindings`, `model_bindings` and `select_bindings`.

With pages (`paged` attention) a row group is a list of B block tables, no range: its rows stand in the order of their
tokens, prompt chunks are not padded to one another in memory, and the whole pool is bound once. Page 0 is nobody's:
what padding writes goes there.

| graph | input | type, shape | meaning |
|---|---|---|---|
| target | token_ids | int64 [T] | decode tokens first, then prefill tokens |
| | positions | int64 [T] | |
| | logit_rows | int64 [L] | packed indices whose logits are wanted |
| | padded_indices | int64 [T] | rows: where a token's attention output stands: b * S + i, prefill behind decode |
| | {group}.tokens | int64 [B, S] | packed index of each padded query; padding points at any token |
| | {group}.past_lengths | int64 [B] | valid positions of the row; 0 for a row without tokens |
| | {group}.query_lengths | int64 [B] | tokens of the row, 0 for a row without tokens |
| | {group}.block_tables | int64 [B, W] | pages: the page of each page_positions positions of a row |
| | {group}.key_cache.{layer}, .value_cache. | float [B, K, C, H] | rows: range of the pool; K and H are the layer's |
| | kv_cache.{layer} | float [P, 2, K, page_positions, H] | pages: the pool, keys and values |
| ingest | taps | float [T, M*D] | absent without tap layers |
| | token_ids | int64 [T] | where the family reads ids (`DrafterDims.ingested_ids`) |
| | last_tokens | int64 [R] | where rows have a state: packed index of each segment's last token |
| | positions | int64 [T] | this and what follows: where there are caches |
| | rows | int64 [T] | `drafter` attention: the KV row of each token; B = the whole pool |
| | context.tokens, .past_lengths, .query_lengths | int64 | other attention: a row group |
| | context.query_lengths, .block_tables | int64 | pages |

| graph | output | type, shape |
|---|---|---|
| target | logits | float32 [L, V] |
| | taps | float [T, M*D], absent without tap layers |
| ingest | last_states | float [R, X]: the state of each segment's last position, where rows have one |
| all | {cache}.out | the cache of that name, written in place |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dspark_trt.contract.dims import DrafterDims, TargetDims

TARGET_GRAPH = "target.onnx"
INGEST_GRAPH = "drafter_ingest.onnx"
DRAFT_GRAPH = "drafter_draft.onnx"
MODEL_GRAPH = "drafter_model.onnx"  # in the place of both where a language model drafts
DRAFT_VOCAB_FILE = "draft_vocab.npy"  # [W] int64, beside the graphs where the drafter cannot propose every id
SELECT_GRAPH = "prefix_select.onnx"


def draft_graph(num_slots: int, gamma: int) -> str:
    """The graph that drafts num_slots; DRAFT_GRAPH drafts gamma."""
    return DRAFT_GRAPH if num_slots == gamma else DRAFT_GRAPH.replace(".onnx", f"_{num_slots}.onnx")


DECODE = "decode"
PREFILL = "prefill"
CONTEXT = "context"
TARGET_GROUPS = (DECODE, PREFILL)

TOKEN_IDS = "token_ids"
POSITIONS = "positions"
LOGIT_ROWS = "logit_rows"
PADDED_INDICES = "padded_indices"
ROWS = "rows"
ANCHOR_IDS = "anchor_ids"
PAST_LENGTHS = "past_lengths"
TEMPERATURES = "temperatures"
UNIFORMS = "uniforms"
BLOCK_ROWS = "block_rows"
ROW_REQUESTS = "row_requests"
ROW_QUERY_LENGTHS = "row_query_lengths"
LAST_TOKENS = "last_tokens"
ROW_STATES = "row_states"

LOGITS = "logits"
TAPS = "taps"
DRAFT_IDS = "draft_ids"
DRAFT_LOGITS = "draft_logits"
CONFIDENCE_LOGITS = "confidence_logits"
LAST_STATES = "last_states"
LOW_STEPS = "low_steps"  # of a target whose layers are switched (graphs/switched.py)

ElementType = Literal["int64", "float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Binding:
    """One graph input or output. A letter in the shape is a dynamic extent."""

    name: str
    element_type: ElementType
    shape: tuple[str | int, ...]


def group_tokens(group: str) -> str:
    return f"{group}.tokens"


def group_past_lengths(group: str) -> str:
    return f"{group}.past_lengths"


def group_query_lengths(group: str) -> str:
    return f"{group}.query_lengths"


def key_cache(group: str, layer: int) -> str:
    return f"{group}.key_cache.{layer}"


def value_cache(group: str, layer: int) -> str:
    return f"{group}.value_cache.{layer}"


def group_block_tables(group: str) -> str:
    return f"{group}.block_tables"


def page_cache(layer: int) -> str:
    return f"kv_cache.{layer}"


def is_cache(name: str) -> bool:
    """Whether an input or output is a part of the KV memory."""
    return "_cache." in name


def cache_output(cache: str) -> str:
    return f"{cache}.out"


def cache_block_output(cache: str) -> str:
    return f"{cache}.block"


def cache_context_output(cache: str) -> str:
    return f"{cache}.context"


def cache_slot_output(cache: str, slot: int) -> str:
    return f"{cache}.slot_{slot}"


def row_group(group: str, dims: TargetDims | DrafterDims) -> tuple[Binding, ...]:
    """The index inputs of one row group."""
    rows, query = f"B_{group}", f"S_{group}"
    cache = dims.cache
    tables = Binding(group_block_tables(group), "int64", (rows, cache.table_width)) if cache.page_positions else None
    return (
        Binding(group_tokens(group), "int64", (rows, query)),
        Binding(group_past_lengths(group), "int64", (rows,)),
        Binding(group_query_lengths(group), "int64", (rows,)),
        *((tables,) if tables else ()),
    )


def caches(group: str, dims: TargetDims | DrafterDims) -> tuple[Binding, ...]:
    """Cache inputs: keys and values, layer after layer; with pages, the pool of each layer, whatever the group."""
    if dims.cache.page_positions:
        return tuple(
            Binding(page_cache(layer), dims.element_type, ("P", *dims.cache.page_shape_of(layer)))
            for layer in range(dims.cache.num_layers)
        )
    return tuple(
        Binding(name(group, layer), dims.element_type, (f"B_{group}", *dims.cache.row_shape_of(layer)))
        for layer in range(dims.cache.num_layers)
        for name in (key_cache, value_cache)
    )


def cache_outputs(group: str, dims: TargetDims | DrafterDims) -> tuple[Binding, ...]:
    return tuple(Binding(cache_output(b.name), b.element_type, b.shape) for b in caches(group, dims))


def _target_caches(dims: TargetDims) -> tuple[Binding, ...]:
    groups = TARGET_GROUPS[:1] if dims.cache.page_positions else TARGET_GROUPS
    return tuple(binding for group in groups for binding in caches(group, dims))


def target_inputs(dims: TargetDims) -> tuple[Binding, ...]:
    return (
        Binding(TOKEN_IDS, "int64", ("T",)),
        Binding(POSITIONS, "int64", ("T",)),
        Binding(LOGIT_ROWS, "int64", ("L",)),
        *(() if dims.cache.page_positions else (Binding(PADDED_INDICES, "int64", ("T",)),)),
        *(binding for group in TARGET_GROUPS for binding in row_group(group, dims)),
        *_target_caches(dims),
    )


def target_outputs(dims: TargetDims) -> tuple[Binding, ...]:
    taps = (Binding(TAPS, dims.element_type, ("T", dims.tap_width)),) if dims.num_taps else ()
    return (
        Binding(LOGITS, "float32", ("L", dims.vocab_size)),
        *taps,
        *(Binding(cache_output(b.name), b.element_type, b.shape) for b in _target_caches(dims)),
    )


def low_steps() -> Binding:
    """The further input of a target whose layers are switched: an element for each of its Linear layers."""
    return Binding(LOW_STEPS, "float32", ("linear_layers",))


def ingest_inputs(dims: DrafterDims) -> tuple[Binding, ...]:
    where: tuple[Binding, ...] = ()
    if dims.cache.num_layers:
        of_rows = (Binding(ROWS, "int64", ("T",)),) if dims.attention == "drafter" else row_group(CONTEXT, dims)
        if dims.cache.page_positions:
            of_rows = of_rows[2:]  # nothing attends: how many tokens each row has, and where they go
        where = (Binding(POSITIONS, "int64", ("T",)), *of_rows)
    return (
        *((Binding(TAPS, dims.element_type, ("T", dims.tap_width)),) if dims.num_taps else ()),
        *((Binding(TOKEN_IDS, "int64", ("T",)),) if dims.ingested_ids != "none" else ()),
        *((Binding(LAST_TOKENS, "int64", ("R",)),) if dims.row_state_width else ()),
        *where,
        *caches(CONTEXT, dims),
    )


def ingest_outputs(dims: DrafterDims) -> tuple[Binding, ...]:
    return (*row_states(LAST_STATES, dims), *cache_outputs(CONTEXT, dims))


def row_states(name: str, dims: DrafterDims) -> tuple[Binding, ...]:
    """Under that name, where rows have a state."""
    width = dims.row_state_width
    return (Binding(name, dims.row_state_type, ("R", width)),) if width else ()
