"""The seam between the runtime and an engine that accepts drafts and draws tokens itself, all rows of a step at once.

Shape letters: `A` rows that are decided, one for every slot of every block; `E` edits of logits; `P` rows that report
log probabilities; `N` tokens that are reported of each. What is known before the target's logits are, the runtime hands
over as numpy arrays: a row's distribution depends on the drafts before it, which are known, and not on what becomes of
them. So no request needs to be decided slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.protocol import Array, Float32, Int64

# Outcomes of a row besides the token that is drawn there
ACCEPTED = -1  # the row's draft is a token
NOT_FINITE = -2  # a logit of the row is NaN or infinite
ALL_MASKED = -3  # no token is left
NOT_REACHED = -4  # behind the end of its block


@dataclass(frozen=True, slots=True)
class AcceptBatch:
    """Blocks of rows, the drafts of a request in order and the row behind them; a block without drafts is one row."""

    logit_rows: Int64  # [A] of the target's logits
    slots: Int64  # [A] place in the block, from 0
    first_rows: Int64  # [A] the row of slot 0 of the same block
    draft_ids: Int64  # [A], -1: nothing is drafted, a token is drawn
    draft_rows: Int64  # [A] of the draft logits, request after request; 0 where the draft is an argmax
    draws: Int64  # [A] index in drawn_rows; -1: the draft is an argmax
    samples: Int64  # [A] index in sampled_rows; -1: greedy
    accept_words: Int64  # [A] 64 random bits each (runtime/rng.py)
    residual_words: Int64  # [A]
    bonus_words: Int64  # [A]
    top_k: Int64  # [A], 0: off
    edit_begins: Int64  # [A] of the block's edits
    edit_ends: Int64  # [A]
    temperatures: Float32  # [A], 0: greedy
    draft_temperatures: Float32  # [A], as the draft was drawn with; 0: argmax
    top_p: Float32  # [A], 1: off
    min_p: Float32  # [A], 0: off
    repetition_penalties: Float32  # [A]
    presence_penalties: Float32  # [A]
    frequency_penalties: Float32  # [A]
    sampled_rows: Int64  # those with top_k or top_p first
    truncated_rows: Int64  # the first of sampled_rows
    drawn_rows: Int64  # whose draft was drawn
    edited_rows: Int64  # that have edits
    reported_rows: Int64  # [P]
    edit_ids: Int64  # [E] tokens, none twice in a block
    edit_masks: Int64  # [E] bit s: must not come in slot s
    edit_is_seen: Int64  # [E] 1: in the prompt or generated, so that repetition_penalty takes it
    edit_counts: Float32  # [E] among the generated tokens
    edit_bias: Float32  # [E]


@dataclass(frozen=True, slots=True)
class AcceptOutcomes:
    """What became of the rows. Log probabilities are the raw log-softmax."""

    outcomes: Int64  # [A]
    log_probs: Float32  # [P] of the row's token, where it has one
    top_ids: NDArray[np.int64]  # [P, N], most probable first, ties by id
    top_log_probs: Float32  # [P, N]


class AcceptEngine(Protocol):
    """Accepts and draws where the logits are."""

    def accept(self, batch: AcceptBatch, logits: Array, draft_logits: Array | None) -> Callable[[], AcceptOutcomes]:
        """Enqueue; what it returns waits for the outcomes, the only wait of the call.

        logits [L, V], as they were when the call is done; draft_logits [R_d, n, W], None where no draft was drawn.
        Raises EngineBuildError when the backend fails.
        """
        ...
