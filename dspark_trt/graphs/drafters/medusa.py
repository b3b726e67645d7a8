"""Medusa heads: each draft comes from the last hidden state alone, so no draft waits for another.

`ingest` keeps the state of each segment's last position; there is no K/V. Source: Medusa (arXiv 2401.10774), section
2.1. Shape letters: `R` requests, `T` context tokens, `W` draft vocabulary, `D` hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import MedusaSpec
from dspark_trt.contract import bindings
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.drafters.parts import ChosenRows, DrafterParts
from dspark_trt.graphs.heads import emit_draw, emit_margin
from dspark_trt.graphs.linears import Linears


@dataclass(frozen=True, slots=True)
class MedusaGraphs:
    """See `FamilyGraphs`."""

    spec: MedusaSpec

    def chosen_rows(self, ids: NDArray[np.int64] | None, own_ids: NDArray[np.int64] | None) -> ChosenRows:
        """Of every head's own matrix, the ids'."""
        if ids is None or self.spec.is_head_shared:
            return {}
        rows = ids if own_ids is None else np.searchsorted(own_ids, ids)
        return {_matrix(head): rows for head in range(self.spec.gamma)}

    def emit_ingest(self, builder: GraphBuilder, parts: DrafterParts) -> None:
        numbers = parts.numbers
        is_same = numbers.model == numbers.context
        last = builder.op(
            "Gather", bindings.TAPS, bindings.LAST_TOKENS, axis=0, output=bindings.LAST_STATES if is_same else None
        )
        numbers.cast(builder, last, numbers.model, numbers.context, output=bindings.LAST_STATES)

    def emit_draft(self, builder: GraphBuilder, parts: DrafterParts) -> None:
        """A head for each of parts.dims.gamma slots. The graphs of all slot counts read the same weights."""
        dims = parts.dims
        blocks = parts.linears(builder)
        source = parts.head_weights if self.spec.is_head_shared else parts.weights
        onto_ids = Linears(builder, source, parts.head_bits, dims.element_type, is_read_again=True)
        states = parts.numbers.cast(builder, bindings.ROW_STATES, parts.numbers.context, parts.numbers.model)
        drafts, logits = [], []
        for slot in range(dims.gamma):
            with builder.scope(f"heads.{slot}"):
                x = states
                for block in range(self.spec.num_blocks):
                    module = f"heads.{slot}.blocks.{block}"
                    bias = f"{module}.bias" if self.spec.has_block_bias else None
                    inner = blocks(x, f"{module}.weight", bias=bias)
                    activated = builder.op("Mul", inner, builder.op("Sigmoid", inner))
                    x = builder.op("Add", x, activated)
                of_rows = onto_ids(x, parts.head_name if self.spec.is_head_shared else _matrix(slot))
                columns, slot_logits = emit_draw(
                    builder,
                    parts.numbers,
                    logits=parts.on_columns(builder, of_rows),
                    hidden=x,
                    uniforms=builder.op("Gather", bindings.UNIFORMS, builder.vector(slot), axis=1),
                    vocab_size=dims.vocab_size,
                    top_n=parts.top_n,
                )
            drafts.append(columns)
            logits.append(slot_logits)
        if parts.ids is None:
            builder.op("Concat", *drafts, axis=1, output=bindings.DRAFT_IDS)
        else:
            columns = builder.op("Concat", *drafts, axis=1)
            builder.op("Gather", builder.constant(parts.ids), columns, axis=0, output=bindings.DRAFT_IDS)
        builder.op("Concat", *logits, axis=1, output=bindings.DRAFT_LOGITS)
        emit_margin(builder, dims.vocab_size)


def _matrix(head: int) -> str:
    return f"heads.{head}.lm_head.weight"
