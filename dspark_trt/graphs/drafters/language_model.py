"""Language models that draft: one pass over packed tokens, and a draft from the logits of each row asked for.

One graph serves all calls: ingested tokens and anchors together, then a token a request for each further draft, or
masks behind the anchors (PARD). So a block of n drafts takes n passes, or one, and the weights are packed once.

Source: speculative decoding (arXiv 2211.17192), PARD (arXiv 2504.18583). Shape letters: `T` packed tokens, `L` rows
that are drafted from, `W` draft vocabulary, `D` hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import LanguageModelSpec
from dspark_trt.contract import bindings
from dspark_trt.graphs.attention import model_attention
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.decoder import DecoderParts
from dspark_trt.graphs.drafters.parts import ChosenRows, DrafterParts
from dspark_trt.graphs.experts import Experts
from dspark_trt.graphs.heads import emit_draw, emit_margin


@dataclass(frozen=True, slots=True)
class LanguageModelGraphs:
    """In the place of the two graphs of `FamilyGraphs`, one."""

    spec: LanguageModelSpec

    def chosen_rows(self, ids: NDArray[np.int64] | None, own_ids: NDArray[np.int64] | None) -> ChosenRows:
        """None: only the head has rows of the draft vocabulary."""
        return {}

    def emit_model(self, builder: GraphBuilder, parts: DrafterParts) -> None:
        """Inputs and outputs are those of `model_bindings`."""
        spec, dims = self.spec, parts.dims
        layers = DecoderParts(
            builder,
            spec.decoder,
            parts.weights,
            parts.numbers,
            parts.linears(builder),
            positions=bindings.POSITIONS,
            num_positions=dims.limits.max_seq_len + dims.gamma,
            experts=self._experts(builder, parts),
        )
        attention = model_attention(builder, spec.decoder, dims)
        token_ids = bindings.TOKEN_IDS
        if spec.draft_vocab_size is not None:  # the target's other ids have no row
            token_ids = builder.op("Min", token_ids, builder.scalar(spec.draft_vocab_size - 1))
        x = layers.embedded(builder.op("Gather", parts.embedding(builder), token_ids, axis=0))
        for layer in range(spec.decoder.num_layers):
            x = layers.layer(layer, x, attention)
        h = layers.norm(builder.op("Gather", x, bindings.LOGIT_ROWS, axis=0), "norm")  # [L, D]
        columns, logits = emit_draw(
            builder,
            parts.numbers,
            logits=parts.base_logits(builder, h),
            hidden=h,
            anchors=bindings.LOGIT_ROWS,
            uniforms=bindings.UNIFORMS,
            vocab_size=dims.vocab_size,
            top_n=parts.top_n,
        )
        if parts.ids is None:
            builder.op("Identity", columns, output=bindings.DRAFT_IDS)
        else:
            builder.op("Gather", builder.constant(parts.ids), columns, axis=0, output=bindings.DRAFT_IDS)
        builder.op("Identity", logits, output=bindings.DRAFT_LOGITS)
        emit_margin(builder, dims.vocab_size)

    def _experts(self, builder: GraphBuilder, parts: DrafterParts) -> Experts | None:
        if (spec := self.spec.decoder.experts) is None:
            return None
        bits, attention = parts.bits.drafter_layers, parts.dims.attention
        return Experts(builder, spec, parts.weights, parts.numbers, bits=bits, attention=attention)
