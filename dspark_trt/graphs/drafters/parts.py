"""What the graphs of every family of drafters are made from: sizes, numbers, weights, embedding and head.

Shape letters: `R` requests, `T` packed tokens, `V` vocabulary, `W` draft vocabulary, `D` hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.layout import EMBEDDING
from dspark_trt.checkpoints.spec import DrafterSpec
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.drafter_form import LOWEST, columns_of
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.decoder import softcapped
from dspark_trt.graphs.linears import Linears
from dspark_trt.graphs.numbers import Numbers
from dspark_trt.graphs.quantize import LinearBits, Quantisation
from dspark_trt.graphs.weights import TensorSource

ChosenRows = Mapping[str, NDArray[np.int64]]  # rows of a weight in the order that a graph wants, by canonical name


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """Of one drafter, whatever its family."""

    spec: DrafterSpec
    dims: DrafterDims  # gamma: the slots of the graph that is written
    numbers: Numbers
    bits: Quantisation
    weights: TensorSource  # the drafter's own
    shared: TensorSource  # the target's
    head_weights: TensorSource
    head_name: str
    head_bits: LinearBits
    ids: NDArray[np.int64] | None  # [W] that are proposed, ascending; None: a column for every id
    own_ids: NDArray[np.int64] | None  # [W] target ids of the head's rows; None: all
    top_n: int  # drafts of a slot come from its so many largest base logits; 0: from all

    def embedding(self, builder: GraphBuilder) -> str:
        """[V, D]"""
        source = self.weights if self.spec.has_own_embedding else self.shared
        return builder.initializer(source.tensor(EMBEDDING, self.dims.element_type))

    def linears(self, builder: GraphBuilder, *, is_read_again: bool = False) -> Linears:
        """Linear layers of the drafter's own weights; `is_read_again` as in `Linears`."""
        bits, element_type = self.bits.drafter_layers, self.numbers.model
        return Linears(builder, self.weights, bits, element_type, is_read_again=is_read_again)

    def base_logits(self, builder: GraphBuilder, hidden: str) -> str:
        """hidden [T, D], normalised -> [T, W] over `ids`, or over every id."""
        head = Linears(
            builder,
            self.head_weights,
            self.head_bits,
            self.dims.element_type,
            is_read_again=self.dims.is_sequential and self.dims.slots_of_call > 1,
        )
        logits = head(hidden, self.head_name)
        if (cap := self.spec.decoder.logit_softcap) is not None:
            logits = softcapped(builder, logits, cap, self.dims.element_type)
        return self.on_columns(builder, logits)

    def on_columns(self, builder: GraphBuilder, logits: str) -> str:
        """Logits [T, W] of a head's own rows, with a column for every id where every id has one."""
        if self.ids is not None or self.own_ids is None:
            return logits
        return _on_every_id(builder, logits, self.own_ids, self.dims, self.numbers)


class FamilyGraphs(Protocol):
    """The graphs of one family. Their inputs and outputs are those of `bindings`."""

    def chosen_rows(self, ids: NDArray[np.int64] | None, own_ids: NDArray[np.int64] | None) -> ChosenRows:
        """Rows of weights that belong to ids of the draft vocabulary, beside those of the head."""
        ...

    def emit_ingest(self, builder: GraphBuilder, parts: DrafterParts) -> None: ...

    def emit_draft(self, builder: GraphBuilder, parts: DrafterParts) -> None:
        """parts.dims.gamma slots."""
        ...


def _on_every_id(
    builder: GraphBuilder, logits: str, ids: NDArray[np.int64], dims: DrafterDims, numbers: Numbers
) -> str:
    """Logits [T, W] of `ids` as [T, V], with the lowest for every other id."""
    lowest = builder.constant(numbers.table(np.full((1, 1), LOWEST[numbers.model], np.float32)))
    rows = builder.op("Shape", logits, end=1)
    column = builder.op("Expand", lowest, builder.op("Concat", rows, builder.vector(1), axis=0))
    columns = builder.constant(columns_of(ids, dims.vocab_size))
    return builder.op("Gather", builder.op("Concat", logits, column, axis=1), columns, axis=1)
