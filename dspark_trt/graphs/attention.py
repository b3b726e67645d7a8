"""Attention: the one seam between backends (docs/adr/0002). Everything else in a graph is standard and shared.

| call | ONNX Runtime | the same, in standard operators | TensorRT |
|---|---|---|---|
| target, causal over packed tokens | `gqa` | `standard` | `paged` |
| drafter, a language model | `gqa` | `standard` | `standard` |
| drafter, a block | `drafter` | `standard` | `paged` |
| drafter, slots one after the other | `drafter` | `standard`, a graph of one slot | the same |
| drafter, context that only enters the cache | `drafter` | `standard` | as its drafts |

An emitter is made once a graph and derives from the graph's index inputs (see `bindings`) what all its layers share.
Queries and keys come to it rotated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from dspark_trt.checkpoints.spec import BlockDrafterSpec, DecoderSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import PORTABLE, Attention, DrafterDims, TargetDims
from dspark_trt.errors import ExportError
from dspark_trt.graphs.attention_drafter import FoldedBlockAttention, ScatterContext
from dspark_trt.graphs.attention_gqa import GqaAttention
from dspark_trt.graphs.attention_masked import Sinks
from dspark_trt.graphs.attention_paged import PagedBlockAttention, PagedCausalAttention, PagedContext
from dspark_trt.graphs.attention_slot import GqaSlots, UnwrittenSlots
from dspark_trt.graphs.attention_standard import StandardBlockAttention, StandardCausalAttention, StandardContext
from dspark_trt.graphs.attention_standard_slot import StandardSlots
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.weights import TensorSource

logger = logging.getLogger(__name__)

_GQA_HEAD_DIM_MULTIPLE = 8


class AttentionEmitter(Protocol):
    """Attention of one graph."""

    def attend(self, layer: int, query_key: str, value: str) -> str:
        """Write keys and values into the layer's cache and attend: [T, (N+K)*H], [T, K*H] -> [T, N*H]."""
        ...


class SlotAttention(Protocol):
    """Attention of slots that are drafted one after the other."""

    def at(self, slot: int, positions: str) -> AttentionEmitter:
        """Of one slot, in their order; `positions` [R] of its tokens."""
        ...


class ContextEmitter(Protocol):
    """Cache writes of one graph that attends to nothing."""

    def append(self, layer: int, key: str, value: str) -> None:
        """Write keys and values [T, K*H] into the layer's cache."""
        ...


def usable_form(wanted: Attention, spec: DecoderSpec, what: str) -> Attention:
    """The wanted form, or `standard` where GroupQueryAttention does not take the head size; a warning says so."""
    head_dims = {spec.shape_of(layer).head_dim for layer in range(spec.num_layers)}
    unusable = sorted(each for each in head_dims if each % _GQA_HEAD_DIM_MULTIPLE)
    if wanted in PORTABLE or not unusable:
        return wanted
    logger.warning(
        "the %s has head_dim %d, ONNX Runtime's GroupQueryAttention takes multiples of %d only: attention falls back "
        "to standard operators, whose cost follows max_seq_len",
        what,
        unusable[0],
        _GQA_HEAD_DIM_MULTIPLE,
    )
    return "standard"


def causal_attention(builder: GraphBuilder, spec: DecoderSpec, dims: TargetDims, *, gamma: int) -> AttentionEmitter:
    """For the target: a token at position p sees the positions up to p of its row.
    A row verifies `gamma` drafts at most."""
    match dims.attention:
        case "gqa":
            is_same = dims.min_query_length > 1
            return GqaAttention(builder, spec, dims.limits, bindings.TARGET_GROUPS, is_same_in_any_step=is_same)
        case "standard":
            return StandardCausalAttention(builder, spec, dims, bindings.TARGET_GROUPS)
        case "paged":
            return PagedCausalAttention(builder, spec, dims, gamma=gamma)
    raise ExportError(f"the target has no attention form {dims.attention!r}; expected 'gqa', 'standard' or 'paged'")


def block_attention(
    builder: GraphBuilder, spec: BlockDrafterSpec, dims: DrafterDims, positions: str, weights: TensorSource
) -> AttentionEmitter:
    """For the draft block: every slot sees the context before the anchor and all slots (paper section 3.1), or less
    where a layer says so.

    `positions` [R * block_length] of the blocks; `weights` of the drafter, where its layers have sinks.
    """
    sinks = Sinks(builder, spec, weights)
    match dims.attention:
        case "drafter":
            return FoldedBlockAttention(builder, spec, sinks, length=dims.block_length, positions=positions)
        case "standard":
            return StandardBlockAttention(builder, spec, sinks, dims)
        case "paged":
            return PagedBlockAttention(builder, spec, sinks, dims, positions)
    raise ExportError(
        f"the drafter has no attention form {dims.attention!r}; expected 'drafter', 'standard' or 'paged'"
    )


def model_attention(builder: GraphBuilder, spec: DecoderSpec, dims: DrafterDims) -> AttentionEmitter:
    """For a language model that drafts: as the target's, of one row group."""
    match dims.attention:
        case "gqa":
            return GqaAttention(builder, spec, dims.limits, (bindings.CONTEXT,))
        case "standard":
            return StandardCausalAttention(builder, spec, dims, (bindings.CONTEXT,))
    raise ExportError(f"the drafter has no attention form {dims.attention!r}; expected 'gqa' or 'standard'")


def slot_attention(builder: GraphBuilder, spec: DecoderSpec, dims: DrafterDims) -> SlotAttention:
    """For the slots of a call that are drafted one after the other, from any position of the context on."""
    match dims.attention:
        case "drafter":
            return GqaSlots(builder, spec, num_slots=dims.slots_of_call)
        case "standard":
            return (StandardSlots if dims.is_slot_by_slot else UnwrittenSlots)(builder, spec, dims)
    raise ExportError(f"the drafter has no attention form {dims.attention!r}; expected 'drafter' or 'standard'")


def context_writer(
    builder: GraphBuilder,
    spec: DecoderSpec,
    dims: DrafterDims,
    *,
    output: Callable[[str], str] = bindings.cache_output,
) -> ContextEmitter:
    """For ingest: the drafter's context enters the cache, which leaves as `output`."""
    match dims.attention:
        case "drafter":
            return ScatterContext(builder, spec, output=output)
        case "standard":
            return StandardContext(builder, spec, dims)
        case "paged":
            return PagedContext(builder, spec, dims)
    raise ExportError(
        f"the drafter has no attention form {dims.attention!r}; expected 'drafter', 'standard' or 'paged'"
    )
