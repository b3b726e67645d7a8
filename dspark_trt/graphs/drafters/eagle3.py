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

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.layout import MASK
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
        embedded = layers.embedded(builder.op("Gather", parts.embedding(builder), bindings.TOKEN_IDS, axis=0))
        writer = context_writer(builder, self.spec.decoder, parts.dims)
        with builder.scope(_LAYER):
            joined, _ = self._joined(builder, parts, layers, embedded, feature)
            writer.append(0, layers.key(0, joined), layers.value(0, joined))
        builder.op("Gather", feature, bindings.LAST_TOKENS, axis=0, output=bindings.LAST_STATES)

    def emit_draft(self, builder: GraphBuilder, parts: DrafterParts) -> None:
        """A run of the layer for each slot of a call. The first one of a block writes the last context position once
        more, as it is there."""
        if self.spec.is_masked:
            return self._emit_masked(builder, parts)
        dims, spec, numbers = parts.dims, self.spec, parts.numbers
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
                embedded = layers.embedded(builder.op("Gather", embedding, token, axis=0))
                joined, residual = self._joined(builder, parts, layers, embedded, feature)
                attended = attention.attend(0, layers.query_key(0, joined), layers.value(0, joined))
                x = layers.layer_output(0, residual, attended, stream=numbers.context)
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
                draft = _as_ids(builder, parts, columns)
                token = builder.op("Squeeze", draft, builder.vector(1))
                feature = _wide(builder, parts, h) if spec.is_output_normed else x
                drafts.append(draft)
                logits.append(slot_logits)
        if dims.is_slot_by_slot:
            builder.op("Identity", feature, output=bindings.LAST_STATES)
        _emit_outputs(builder, parts, drafts, logits)

    def _emit_masked(self, builder: GraphBuilder, parts: DrafterParts) -> None:
        """DART: queries, keys and values of each slot, then the rest of the layer for all slots at once."""
        dims = parts.dims
        slots = slot_attention(builder, self.spec.decoder, dims)
        mask = builder.initializer(parts.weights.tensor(MASK, dims.element_type))  # [2D]
        shape = builder.op("Concat", builder.op("Shape", bindings.ANCHOR_IDS), builder.vector(1), axis=0)
        masks = builder.op("Expand", mask, shape)  # [R, 2D]
        first_half = builder.op("Slice", masks, builder.vector(0), builder.vector(dims.hidden_size), builder.vector(1))
        attended, residuals = [], []
        for slot in range(dims.gamma):
            with builder.scope(f"slot_{slot}"):
                positions = builder.op("Add", bindings.PAST_LENGTHS, builder.scalar(slot - 1))
                positions = builder.op("Max", positions, builder.scalar(0))  # [R]
                num_positions = dims.limits.max_seq_len + dims.gamma
                layers = self._layers(builder, parts, positions, num_positions, num_runs=dims.gamma)
                joined, residual = masks, _wide(builder, parts, first_half)
                if slot == 0:
                    rows_of = builder.op("Gather", parts.embedding(builder), bindings.ANCHOR_IDS, axis=0)
                    joined, residual = self._joined(
                        builder, parts, layers, layers.embedded(rows_of), bindings.ROW_STATES
                    )
                attention = slots.at(slot, positions)
                attended.append(attention.attend(0, layers.query_key(0, joined), layers.value(0, joined)))
                residuals.append(residual)
        context = parts.numbers.context
        residual = _stacked(builder, residuals)
        x = layers.layer_output(0, residual, _stacked(builder, attended), stream=context)  # [R * n, D]
        h = layers.norm(layers.norm(x, "norm", source=context), "norm")
        drafts, logits = [], []
        of_slots = builder.vector(-1, dims.gamma, dims.hidden_size)
        hidden = builder.op("Reshape", h, of_slots)
        base = builder.op("Reshape", parts.base_logits(builder, h), builder.vector(-1, dims.gamma, dims.vocab_size))
        for slot in range(dims.gamma):
            with builder.scope(f"slot_{slot}"):
                columns, slot_logits = emit_draw(
                    builder,
                    parts.numbers,
                    logits=builder.op("Gather", base, builder.scalar(slot), axis=1),
                    hidden=builder.op("Gather", hidden, builder.scalar(slot), axis=1),
                    uniforms=builder.op("Gather", bindings.UNIFORMS, builder.vector(slot), axis=1),
                    vocab_size=dims.vocab_size,
                    top_n=parts.top_n,
                )
                drafts.append(_as_ids(builder, parts, columns))
                logits.append(slot_logits)
        _emit_outputs(builder, parts, drafts, logits)

    def _layers(
        self, builder: GraphBuilder, parts: DrafterParts, positions: str, num_positions: int, *, num_runs: int
    ) -> DecoderParts:
        return DecoderParts(
            builder,
            self.spec.decoder,
            parts.weights,
            parts.numbers,
            parts.linears(builder, is_read_again=num_runs > 1),
            positions=positions,
            num_positions=num_positions,
        )

    def _feature(self, builder: GraphBuilder, parts: DrafterParts, layers: DecoderParts) -> str:
        """taps [T, M*D] -> [T, D], of the context's type, as are all features and the residual stream."""
        spec, numbers = self.spec, parts.numbers
        taps = bindings.TAPS
        if spec.is_module:
            return _wide(builder, parts, taps)
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
        """What the layer's projections read, and where its residual stream starts [T, D].

        EAGLE-3's read embedding and feature side by side [T, 2D], a module's what a matrix makes of both [T, D].
        """
        context = parts.numbers.context
        if self.spec.is_module:
            both = layers.norm(feature, "hidden_norm", source=context), layers.norm(embedded, "token_norm")
            x = layers.linear(builder.op("Concat", *both, axis=1), "fc.weight")
            return layers.norm(x, f"{_LAYER}.input_layernorm"), _wide(builder, parts, x)
        normed = layers.norm(feature, f"{_LAYER}.hidden_norm", source=context)
        joined = builder.op("Concat", layers.norm(embedded, f"{_LAYER}.input_layernorm"), normed, axis=1)
        return joined, _wide(builder, parts, normed) if self.spec.is_residual_normed else feature


def _wide(builder: GraphBuilder, parts: DrafterParts, x: str) -> str:
    """`x` of the model's type in that of the context."""
    return parts.numbers.cast(builder, x, parts.numbers.model, parts.numbers.context)


def _as_ids(builder: GraphBuilder, parts: DrafterParts, columns: str) -> str:
    """Target ids of columns [R, 1]."""
    if parts.ids is None:
        return columns
    return builder.op("Gather", builder.constant(parts.ids), columns, axis=0)


def _stacked(builder: GraphBuilder, of_slots: list[str]) -> str:
    """[R, width] of every slot -> [R * n, width], a request's slots together."""
    rows = [builder.op("Unsqueeze", each, builder.vector(1)) for each in of_slots]
    shape = builder.op("Concat", builder.vector(-1), builder.op("Shape", of_slots[0], start=1), axis=0)
    return builder.op("Reshape", builder.op("Concat", *rows, axis=1), shape)


def _emit_outputs(builder: GraphBuilder, parts: DrafterParts, drafts: list[str], logits: list[str]) -> None:
    """Drafts [R, 1] and logits [R, 1, W] of every slot, and the margins."""
    builder.op("Concat", *drafts, axis=1, output=bindings.DRAFT_IDS)
    builder.op("Concat", *logits, axis=1, output=bindings.DRAFT_LOGITS)
    emit_margin(builder, parts.dims.vocab_size)
