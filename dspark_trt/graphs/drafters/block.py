"""Block drafters (DSpark, DFlash): `ingest` brings taps into the context caches, `draft` makes one block per request.

Source: paper section 3.1, eq. 2-7. Shape letters: `R` requests, `G` gamma, `T` context tokens, `V` vocabulary, `D`
hidden, `M` tap layers.
"""

from __future__ import annotations

import numpy as np
from dspark_trt_plugins.markov_head.form import W1, W2
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import BlockDrafterSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.drafter_form import columns_of
from dspark_trt.graphs.attention import ContextEmitter, block_attention, context_writer
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.decoder import DecoderParts
from dspark_trt.graphs.drafters.parts import ChosenRows, DrafterParts
from dspark_trt.graphs.heads import emit_markov_head
from dspark_trt.graphs.linears import Linears


class BlockGraphs:
    """See `FamilyGraphs`."""

    def __init__(self, spec: BlockDrafterSpec) -> None:
        self._spec = spec

    def chosen_rows(self, ids: NDArray[np.int64] | None, own_ids: NDArray[np.int64] | None) -> ChosenRows:
        """Of W1, the ids' and then every id's, for the anchor; of W2, the ids'."""
        vocab_size = self._spec.decoder.vocab_size
        if ids is not None:
            every_id = np.arange(vocab_size, dtype=np.int64)
            return {
                W1: np.concatenate((ids, every_id)),
                W2: ids if own_ids is None else np.searchsorted(own_ids, ids),
            }
        if own_ids is not None:
            # the bias of an id without a column is any: its base logit is the lowest
            return {W2: columns_of(own_ids, vocab_size) % len(own_ids)}
        return {}

    def emit_ingest(self, builder: GraphBuilder, parts: DrafterParts) -> None:
        self._emit_context(builder, parts, context_writer(builder, self._spec.decoder, parts.dims))

    def _emit_context(self, builder: GraphBuilder, parts: DrafterParts, writer: ContextEmitter) -> None:
        """K and V of every layer straight from the context feature; it passes through no input_layernorm."""
        spec, dims, numbers = self._spec, parts.dims, parts.numbers
        layers = DecoderParts(
            builder,
            spec.decoder,
            parts.weights,
            numbers,
            parts.linears(builder),
            positions=bindings.POSITIONS,
            num_positions=dims.limits.max_seq_len,
        )
        fc = Linears(builder, parts.weights, None, numbers.context)
        taps = numbers.cast(builder, bindings.TAPS, numbers.model, numbers.context)
        context = layers.norm(fc(taps, "fc.weight"), "hidden_norm", source=numbers.context)  # [T, D]
        for layer in range(spec.decoder.num_layers):
            with builder.scope(f"layers.{layer}"):
                writer.append(layer, layers.key(layer, context), layers.value(layer, context))

    def emit_draft(self, builder: GraphBuilder, parts: DrafterParts) -> None:
        """All slots at once, then the sequential stage."""
        dims = parts.dims
        if dims.ingests_in_draft:
            output = bindings.cache_context_output
            with builder.scope("context"):
                self._emit_context(builder, parts, context_writer(builder, self._spec.decoder, dims, output=output))
        h = self._emit_backbone(builder, parts)
        emit_markov_head(
            builder,
            self._spec,
            parts.weights,
            parts.numbers,
            base_logits=builder.op(
                "Reshape", parts.base_logits(builder, h), builder.vector(-1, dims.gamma, dims.vocab_size)
            ),
            hidden=builder.op("Reshape", h, builder.vector(-1, dims.gamma, dims.hidden_size)),
            num_slots=dims.gamma,
            draft_vocab=parts.ids,
            top_n=parts.top_n,
        )

    def _emit_backbone(self, builder: GraphBuilder, parts: DrafterParts) -> str:
        """h of every slot after the final norm, [R * G, D]; of a mask-first block without the anchor's position."""
        spec, dims = self._spec, parts.dims
        past = builder.op("Unsqueeze", bindings.PAST_LENGTHS, builder.vector(1))  # [R, 1]
        places = builder.constant(np.arange(dims.block_length, dtype=np.int64))
        positions = builder.op("Reshape", builder.op("Add", past, places), builder.vector(-1))  # [R * length]
        layers = DecoderParts(
            builder,
            spec.decoder,
            parts.weights,
            parts.numbers,
            parts.linears(builder),
            positions=positions,
            num_positions=dims.limits.max_seq_len + dims.block_length,
        )
        attention = block_attention(builder, spec, dims, positions, parts.weights)
        anchors = builder.op("Unsqueeze", bindings.ANCHOR_IDS, builder.vector(1))  # [R, 1]
        # the anchor, then masks
        is_anchor = builder.constant(np.arange(dims.block_length) == 0)
        block = builder.op("Where", is_anchor, anchors, builder.scalar(spec.mask_token_id))  # [R, length]
        rows = builder.op("Gather", parts.embedding(builder), builder.op("Reshape", block, builder.vector(-1)), axis=0)
        x = layers.embedded(rows)
        for layer in range(spec.decoder.num_layers):
            x = layers.layer(layer, x, attention)
        if dims.is_mask_first:
            blocks = builder.op("Reshape", x, builder.vector(-1, dims.block_length, dims.hidden_size))
            slots = builder.op("Gather", blocks, builder.constant(np.arange(1, dims.block_length)), axis=1)
            x = builder.op("Reshape", slots, builder.vector(-1, dims.hidden_size))
        return layers.norm(x, "norm")
