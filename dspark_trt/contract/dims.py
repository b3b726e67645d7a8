"""Every size that a graph is written for, once: the exporter writes them into the graph, the engine reads them back.

Shape letters: `R` requests, `G` gamma, `T` packed tokens, `V` vocabulary, `D` hidden, `M` tap layers, `K` KV heads,
`H` head dim, `C` positions that a cache row has room for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dspark_trt.checkpoints.spec import (
    BlockDrafterSpec,
    DecoderSpec,
    DrafterSpec,
    Eagle3Spec,
    IngestedIds,
    LanguageModelSpec,
    TargetSpec,
)
from dspark_trt.contract.cache_dims import PAGE_POSITIONS, TILE_POSITIONS, CacheDims
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import EngineBuildError

Attention = Literal["gqa", "drafter", "standard", "paged"]
PORTABLE: frozenset[Attention] = frozenset(("standard", "paged"))  # in standard operators and `dspark` nodes
FloatType = Literal["float32", "float16", "bfloat16"]  # of weights, hidden states, taps and caches

METADATA_KEY = "dspark_dims"  # of the graph's metadata_props
SCHEMA_VERSION = 3
MASK_SCOPE = "mask"  # of nodes of a graph that make a mask over whole rows
# That TensorRT's own attention has kernels for; others are products of matrices.
NATIVE_HEAD_DIMS = range(16, 256 + 1, 8)


@dataclass(frozen=True, slots=True)
class TargetDims:
    """Sizes of the target graph."""

    limits: EngineLimits
    cache: CacheDims
    attention: Attention
    vocab_size: int  # V
    hidden_size: int  # D
    num_taps: int  # M
    element_type: FloatType = "float32"
    min_query_length: int = 1  # a row with fewer tokens in a call has so many queries all the same
    pads_chunks: bool = False  # with pages: a layer attends over rows padded to the longest chunk

    @property
    def tap_width(self) -> int:
        return self.num_taps * self.hidden_size


@dataclass(frozen=True, slots=True)
class DrafterDims:
    """Sizes of the two drafter graphs, and what an engine of any family has to hand them."""

    limits: EngineLimits
    cache: CacheDims
    attention: Attention
    vocab_size: int  # W: of the draft vocabulary
    hidden_size: int  # D
    num_taps: int  # M
    gamma: int  # G
    element_type: FloatType = "float32"
    is_mask_first: bool = False  # the anchor's position stands before the slots and predicts nothing
    ingested_ids: IngestedIds = "none"  # ids that `ingest` reads beside the taps
    row_state_width: int = 0  # numbers that are kept of a row's last ingested position: out of `ingest`, into `draft`
    is_sequential: bool = False  # a draft call writes the caches once for each slot, one after the other
    has_masks: bool = False  # of EAGLE-3's form (DART): no slot waits for a draft
    mask_token_id: int | None = None  # of a language model: all slots in one call, of masks behind the anchor
    ingests_in_draft: bool = False  # a draft graph brings the context up itself, before it drafts

    @property
    def tap_width(self) -> int:
        return self.num_taps * self.hidden_size

    @property
    def block_length(self) -> int:
        """Positions of a block of gamma drafts."""
        return self.gamma + self.is_mask_first

    @property
    def row_state_type(self) -> FloatType:
        """Of what is kept of a row: features of taps, which float16 does not hold, are float32 there."""
        return "float32" if self.element_type == "float16" else self.element_type

    @property
    def is_slot_by_slot(self) -> bool:
        """Whether a call of the draft graph makes one slot: a compiler for devices updates a cache once in a graph."""
        return self.is_sequential and not self.has_masks and self.attention == "standard"

    @property
    def is_in_turn(self) -> bool:
        """Whether a device makes the slots of a block by one call after the other."""
        is_language_model = self.ingested_ids == "token"
        return self.is_slot_by_slot or (is_language_model and self.mask_token_id is None)

    @property
    def slots_of_call(self) -> int:
        """Drafts of each request that one call of the draft graph makes."""
        return 1 if self.is_slot_by_slot else self.gamma

    @property
    def num_masks(self) -> int:
        """Behind each anchor of a language model's block, at most."""
        return 0 if self.mask_token_id is None else self.gamma - 1

    @property
    def longest_pass(self) -> int:
        """Positions of a row that a language model reads in the first pass of a block, at most: what a verification
        committed, the anchor, and masks behind it."""
        return self.gamma + 2 + self.num_masks


def target_dims(
    spec: TargetSpec,
    *,
    num_taps: int,
    limits: EngineLimits,
    attention: Attention,
    element_type: FloatType = "float32",
    min_query_length: int = 1,
) -> TargetDims:
    """A row has room for max_seq_len and the longest query behind it, padding included; with pages, where nothing is
    padded, for max_seq_len.

    The region [max_seq_len, C) never holds a valid position, so rows without tokens may be written there.
    """
    is_paged = attention == "paged"
    behind = 0 if is_paged else limits.max_batch_tokens
    cache = _cache(spec.decoder, limits, limits.max_seq_len + behind, attention)
    return TargetDims(
        limits,
        cache,
        attention,
        spec.decoder.vocab_size,
        spec.decoder.hidden_size,
        num_taps,
        element_type,
        min_query_length,
        pads_chunks=is_paged and not all(attends_live(spec.decoder, layer, limits) for layer in _layers(spec.decoder)),
    )


def drafter_dims(
    spec: DrafterSpec,
    *,
    limits: EngineLimits,
    attention: Attention,
    element_type: FloatType = "float32",
    num_draft_ids: int | None = None,
) -> DrafterDims:
    """A row has room for max_seq_len, the draft block behind it and, where ingest pads, the longest padded chunk."""
    behind = spec.block_length
    if attention == "standard":
        behind = max(behind, limits.max_batch_tokens)
    if isinstance(spec, LanguageModelSpec):  # a chunk and a block in one call
        behind = spec.block_length + limits.max_batch_tokens
    return DrafterDims(
        limits,
        _cache(spec.decoder, limits, limits.max_seq_len + behind, attention),
        attention,
        num_draft_ids or spec.decoder.vocab_size,
        spec.decoder.hidden_size,
        spec.num_taps,
        spec.gamma,
        element_type,
        is_mask_first=isinstance(spec, BlockDrafterSpec) and spec.is_mask_first,
        ingested_ids=spec.ingested_ids,
        row_state_width=spec.row_state_width,
        is_sequential=spec.is_sequential,
        has_masks=isinstance(spec, Eagle3Spec) and spec.is_masked,
        mask_token_id=spec.mask_token_id if isinstance(spec, LanguageModelSpec) else None,
        ingests_in_draft=attention == "drafter" and isinstance(spec, BlockDrafterSpec),
    )


def device_attention(spec: DrafterSpec) -> Attention:
    """The form that a drafter takes on a device: blocks stand in the pages of the target's rows, other families in
    rows of their own."""
    return "paged" if isinstance(spec, BlockDrafterSpec) else "standard"


def attends_live(spec: DecoderSpec, layer: int, limits: EngineLimits) -> bool:
    """Whether the kernels of `dspark::RowAttention` do a layer: they know neither a window nor another scale."""
    window = spec.window_of(layer)
    return spec.gemma is None and (window is None or window >= limits.max_seq_len)


def _layers(spec: DecoderSpec) -> range:
    return range(spec.num_layers)


def host_attention(spec: DrafterSpec) -> Attention:
    """The form that a drafter takes on ONNX Runtime, where its head size allows it."""
    return "gqa" if isinstance(spec, LanguageModelSpec) else "drafter"


def _cache(spec: DecoderSpec, limits: EngineLimits, capacity: int, attention: Attention) -> CacheDims:
    if attention in PORTABLE:
        capacity = -(-capacity // TILE_POSITIONS) * TILE_POSITIONS
    shapes = [spec.shape_of(layer) for layer in range(spec.num_layers)]
    heads = tuple((shape.num_kv_heads, shape.head_dim) for shape in shapes)
    num_kv_heads, head_dim = heads[0] if heads else (spec.num_kv_heads, spec.head_dim)
    of_layers = heads if len(set(heads)) > 1 else ()
    page_positions = PAGE_POSITIONS if attention == "paged" else 0
    return CacheDims(spec.num_layers, limits.max_requests, num_kv_heads, capacity, head_dim, of_layers, page_positions)


def to_metadata(dims: TargetDims | DrafterDims) -> dict[str, str]:
    """What a graph carries so that an engine needs nothing but the graph."""
    fields = asdict(dims)
    if not dims.cache.layer_heads:
        del fields["cache"]["layer_heads"]
    if not dims.cache.page_positions:
        del fields["cache"]["page_positions"]
    if not fields.get("pads_chunks"):
        fields.pop("pads_chunks", None)
    return {METADATA_KEY: json.dumps({"schema_version": SCHEMA_VERSION, **fields})}


def target_dims_from_metadata(metadata: dict[str, str], where: str) -> TargetDims:
    """Raises EngineBuildError when the graph is not one of ours or of another version."""
    return TargetDims(**_fields(metadata, where))


def drafter_dims_from_metadata(metadata: dict[str, str], where: str) -> DrafterDims:
    """Raises EngineBuildError when the graph is not one of ours or of another version."""
    return DrafterDims(**_fields(metadata, where))


def _fields(metadata: dict[str, str], where: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(metadata.get(METADATA_KEY, "{}"))
    if (version := fields.pop("schema_version", None)) != SCHEMA_VERSION:
        raise EngineBuildError(
            f"{where}: expected a graph with {METADATA_KEY} of version {SCHEMA_VERSION}, found {version}; "
            "run `dspark-trt build` again"
        )
    cache = fields["cache"]
    heads = tuple((num_kv_heads, head_dim) for num_kv_heads, head_dim in cache.pop("layer_heads", ()))
    return fields | {"limits": EngineLimits(**fields["limits"]), "cache": CacheDims(**cache, layer_heads=heads)}
