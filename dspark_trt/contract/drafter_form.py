"""How a drafter is written into its graphs: it changes what is proposed, never what is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

DrafterPrecision = Literal["fp32", "int8"]
# Base logit of an id that a drafter cannot propose, by the element type of the logits: no probability is left of it.
LOWEST: dict[str, float] = {"float32": -1e30, "bfloat16": -1e30, "float16": -65504.0}


@dataclass(frozen=True, slots=True, eq=False)
class DrafterForm:
    """Chosen at build (see building/drafter_choice)."""

    precision: DrafterPrecision = "fp32"  # of Linear layers and head, beside a target of float32 or int8
    draft_vocab: NDArray[np.int64] | None = None  # [W] target ids that can be proposed, ascending; None: all
    markov_top_n: int = 0  # drafts of a slot come from its so many largest base logits; 0: from all


PLAIN_DRAFTER = DrafterForm()


def proposed_ids(form: DrafterForm, own_ids: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """Target ids that a drafter in that form proposes, ascending; None: all. `own_ids` are those its head has."""
    if own_ids is None or form.draft_vocab is None:
        return form.draft_vocab if own_ids is None else own_ids
    return np.intersect1d(own_ids, form.draft_vocab)


def columns_of(draft_ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """The column of each target id [V] among those of `draft_ids` [W]; W for an id that has none."""
    columns = np.full(vocab_size, len(draft_ids), np.int64)
    columns[draft_ids] = np.arange(len(draft_ids))
    return columns


def slot_counts(gamma: int) -> tuple[int, ...]:
    """Slots that a block can have: one graph each, on engines that can draft fewer than gamma."""
    return tuple(sorted({count for count in (1, 2, 3, 4, gamma) if count <= gamma}))
