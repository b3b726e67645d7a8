"""EAGLE-3 drafters: a decoder layer that reads a token's embedding beside a feature, and drafts slot after slot.

`ingest` makes the feature of each position from its taps, and K and V of feature and next token. `draft` starts again
at the last ingested position, whose feature it is given, and runs the layer once for each slot: what comes out of a
slot is the feature of the next one, and its draft the token. All slots are inside one graph, but with `standard`
attention: there a call makes one slot and hands out the feature of the next one.

Source: EAGLE-3 (arXiv 2503.01840), section 3. Shape letters: `R` requests, `G` slots, `T` context tokens, `W` draft
vocabulary, `D` hidden, `M` tap layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import Eagle3Spec
from dspark_trt.contract import bindings
from dspark_trt.graphs.attention import context_writer, slot_attention
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.decoder import DecoderParts
from dspark_trt.graphs.drafters.parts import ChosenRows, DrafterParts
from dspark_trt.graphs.heads import emit_draw, emit_margin
from dspark_trt.graphs.linears import Linears

_LAYER = "layers.0"


@dataclass(frozen=True, slots=True)
class Eagle3Graphs:
    """See `FamilyGraphs`."""

    spec: Eagle3Spec

    def chosen_rows(self, ids: NDArray[np.int64] | None, own_ids: NDArray[np.int64] | None) -> ChosenRows:
        """None: only the head has rows of the draft vocabulary."""
        return {}

    def emit_ingest(self, builder: GraphBuilder, parts: DrafterParts) -> None:
        """The layer's K and V of every position, and the feature of each segment's last one."""
        layers = self._layers(builder, parts, bindings.POSITIONS, parts.dims.limits.max_seq_len, num_runs=1)
        feature = self._feature(builder, parts, layers)
        embedded = builder.op("Gather", parts.embedding(builder), bindings.TOKEN_IDS, axis=0)
        writer = context_writer(builder, self.spec.decoder, parts.dims)
        with builder.scope(_LAYER):
            joined, _ = self._joined(builder, parts, layers, embedded, feature)
            writer.append(0, layers.key(0, joined), layers.value(0, joined))
        builder.op("Gather", feature, bindings.LAST_TOKENS, axis=0, output=bindings.LAST_STATES)

    def emit_draft(self, builder: GraphBuilder, parts: DrafterParts) -> None:
        """A run of the layer for each slot of a call. The first one of a block writes the last context position once
        more, as it is there."""
        dims, spec, numbers = parts.dims, self.spec, parts.numbers
        wide = partial(numbers.cast, source=numbers.model, to=numbers.context)
        embedding = parts.embedding(builder)
        slots = slot_attention(builder, spec.decoder, dims)
        feature, token = bindings.ROW_STATES, bindings.ANCHOR_IDS
        drafts, logits = [], []
        for slot in range(dims.slots_of_call):
            with builder.scope(f"slot_{slot}"):
                positions = builder.op("Add", bindings.PAST_LENGTHS, builder.scalar(slot - 1))
                positions = builder.op("Max", positions, builder.scalar(0))  # [R]
                num_positions = dims.limits.max_seq_len + dims.gamma
                layers = self._layers(builder, parts, positions, num_positions, num_runs=dims.slots_of_call)
                attention = slots.at(slot, positions)
                embedded = builder.op("Gather", embedding, token, axis=0)
                joined, residual = self._joined(builder, parts, layers, embedded, feature)
                attended = attention.attend(0, layers.query_key(0, joined), layers.value(0, joined))
                x = builder.op("Add", residual, wide(builder, layers.attention_output(0, attended)))
                normed = layers.norm(x, f"{_LAYER}.post_attention_layernorm", source=numbers.context)
                x = builder.op("Add", x, wide(builder, layers.mlp(0, normed)))
                h = layers.norm(x, "norm", source=numbers.context)
                columns, slot_logits = emit_draw(
                    builder,
                    numbers,
                    logits=parts.base_logits(builder, h),
                    hidden=h,
                    uniforms=builder.op("Gather", bindings.UNIFORMS, builder.vector(slot), axis=1),
                    vocab_size=dims.vocab_size,
                    top_n=parts.top_n,
                )
                draft = columns
                if parts.ids is not None:
                    draft = builder.op("Gather", builder.constant(parts.ids), columns, axis=0)
                token = builder.op("Squeeze", draft, builder.vector(1))
                feature = wide(builder, h) if spec.is_output_normed else x
                drafts.append(draft)
                logits.append(slot_logits)
        builder.op("Concat", *drafts, axis=1, output=bindings.DRAFT_IDS)
        builder.op("Concat", *logits, axis=1, output=bindings.DRAFT_LOGITS)
        if dims.is_slot_by_slot:
            builder.op("Identity", feature, output=bindings.LAST_STATES)
        emit_margin(builder, dims.vocab_size)

    def _layers(
        self, builder: GraphBuilder, parts: DrafterParts, positions: str, num_positions: int, *, num_runs: int
    ) -> DecoderParts:
        return DecoderParts(
            builder,
            self.spec.decoder,
            parts.weights,
            parts.numbers,
            bits=parts.bits.drafter_layers,
            positions=positions,
            num_positions=num_positions,
            is_read_again=num_runs > 1,
        )

    def _feature(self, builder: GraphBuilder, parts: DrafterParts, layers: DecoderParts) -> str:
        """taps [T, M*D] -> [T, D], of the context's type, as are all features and the residual stream."""
        spec, numbers = self.spec, parts.numbers
        taps = bindings.TAPS
        if spec.tap_norm == "joint":
            taps = layers.norm(taps, "input_norm")
        elif spec.tap_norm == "each":
            each = builder.multi_op("Split", taps, axis=1, num_outputs=spec.num_taps, outputs=(None,) * spec.num_taps)
            normed = [layers.norm(tap, f"fc_norm.{index}") for index, tap in enumerate(each)]
            taps = builder.op("Concat", *normed, axis=1)
        fc = Linears(builder, parts.weights, None, numbers.context)
        return fc(numbers.cast(builder, taps, numbers.model, numbers.context), "fc.weight")

    def _joined(
        self, builder: GraphBuilder, parts: DrafterParts, layers: DecoderParts, embedded: str, feature: str
    ) -> tuple[str, str]:
        """What the layer's projections read [T, 2D], embedding first, and where its residual stream starts [T, D]."""
        numbers = parts.numbers
        normed = layers.norm(feature, f"{_LAYER}.hidden_norm", source=numbers.context)
        joined = builder.op("Concat", layers.norm(embedded, f"{_LAYER}.input_layernorm"), normed, axis=1)
        if self.spec.is_residual_normed:
            return joined, numbers.cast(builder, normed, numbers.model, numbers.context)
        return joined, feature
