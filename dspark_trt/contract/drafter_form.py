"""How a drafter is written into its graphs: it changes what is proposed, never what is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

DrafterPrecision = Literal["fp32", "int8"]


@dataclass(frozen=True, slots=True, eq=False)
class DrafterForm:
    """Chosen at build (see building/drafter_choice)."""

    precision: DrafterPrecision = "fp32"  # of Linear layers and head, where the pair is built in float32
    draft_vocab: NDArray[np.int64] | None = None  # [W] target ids that can be proposed, ascending; None: all
    markov_top_n: int = 0  # drafts of a slot come from its so many largest base logits; 0: from all


PLAIN_DRAFTER = DrafterForm()


def slot_counts(gamma: int) -> tuple[int, ...]:
    """Slots that a block can have: one graph each, on engines that can draft fewer than gamma."""
    return tuple(sorted({count for count in (1, 2, 3, 4, gamma) if count <= gamma}))
