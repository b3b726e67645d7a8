"""The packed call of the target that follows from a plan and a block.

Shape letters: `R` requests that decode, `T` packed tokens, `L` logit rows, `G` gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.protocol import SelectBatch, TargetBatch
from dspark_trt.errors import EngineBuildError
from dspark_trt.runtime.arrays import argmax_rows
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.kv import CacheLengths
from dspark_trt.runtime.prefix_scheduler import Offer
from dspark_trt.runtime.prices import StepPrices
from dspark_trt.runtime.sampling import is_greedy
from dspark_trt.runtime.state import RequestState
from dspark_trt.runtime.step_plan import StepPlan
from dspark_trt.runtime.trajectories import TrajectoryIndex


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's tokens in the packed call."""

    state: RequestState
    first_token: int  # packed index
    num_tokens: int
    first_logit: int | None  # its first logit row; None: a prompt chunk with more to come
    draft_ids: list[int]  # x_1 .. x_verify_len, behind the anchor; those before the first that is no token
    block_row: int  # its row of the draft block, where it drafted
    num_proposed: int  # drafts that were made for it
    is_prefill: bool = False


def offer_drafts(
    plan: StepPlan,
    prices: StepPrices | None,
    num_usable: NDArray[np.int64] | None = None,
    lookup_survival: NDArray[np.float64] | None = None,
) -> Offer:
    """What the planned step could verify. num_usable [R of those that have drafts]:
    usable drafts, where the block is known. lookup_survival [R of those that look up, G]."""
    offering = plan.offering
    caps = plan.caps[: len(offering)]
    if num_usable is not None:
        caps = np.minimum(caps, num_usable)
    has_equal_key = np.array([state.has_equal_key for state in offering], dtype=np.bool_)
    return Offer(
        rows=np.array([state.row for state in offering], dtype=np.int64),
        generations=np.array([state.generation for state in offering], dtype=np.int64),
        caps=caps,
        is_forced=has_equal_key | plan.is_explored[: len(offering)],
        num_requests=len(plan.decode),
        step_ms=None if prices is None else plan.step_ms(prices, int(caps.sum())),
        is_greedy=np.array([is_greedy(state.params.temperature) for state in offering], dtype=np.bool_),
        lookup_survival=lookup_survival,
    )


def pack(
    plan: StepPlan, verify_lens: NDArray[np.int64], block: DraftBlock | None, cache: CacheLengths
) -> tuple[TargetBatch, list[Segment]]:
    """The target's call: anchor and drafts of every request that decodes, then the prompt chunks.

    Logits are asked for every token of a decoding request, and for the last token of a finished prompt. verify_lens
    [R]. A draft that is no token, which only a device that selects can have sent to verification, was not proposed: its
    segment's drafts end before it. What the target makes of it stands behind them and is never read.
    """
    token_ids: list[int] = []
    logit_rows: list[int] = []
    segments = []
    for index, (state, verify_len) in enumerate(zip(plan.decode, verify_lens.tolist(), strict=True)):
        draft_ids = block.draft_ids[index, :verify_len].tolist() if block is not None and verify_len else []
        first_token, first_logit = len(token_ids), len(logit_rows)
        token_ids += [state.anchor_id, *draft_ids]
        logit_rows += range(first_token, len(token_ids))
        if block is not None and draft_ids:
            draft_ids = draft_ids[: block.num_usable[index]]
        num_proposed = plan.num_proposed(index) if block is not None else 0
        segments.append(Segment(state, first_token, 1 + verify_len, first_logit, draft_ids, index, num_proposed))
    for chunk in plan.prefill:
        state, first_token, begin = chunk.state, len(token_ids), chunk.state.num_prefilled
        token_ids += state.prompt_ids[begin : begin + chunk.num_tokens].tolist()
        last_logit = len(logit_rows) if chunk.is_last else None
        if chunk.is_last:
            logit_rows.append(len(token_ids) - 1)
        segments.append(Segment(state, first_token, chunk.num_tokens, last_logit, [], 0, 0, is_prefill=True))
    rows = np.array([segment.state.row for segment in segments], dtype=np.int64)
    batch = TargetBatch(
        token_ids=np.array(token_ids, dtype=np.int64),
        rows=rows,
        past_lengths=cache.committed[rows],
        query_lengths=np.array([segment.num_tokens for segment in segments], dtype=np.int64),
        num_decode=len(plan.decode),
        logit_rows=np.array(logit_rows, dtype=np.int64),
    )
    return batch, segments


def select_batch(plan: StepPlan, num_admitted: int, temperatures: NDArray[np.float64]) -> SelectBatch:
    """What the device selects by. num_admitted: PrefixScheduler.budget; temperatures [G] (STS)."""
    return SelectBatch(
        num_admitted=num_admitted,
        caps=plan.caps,
        is_forced=plan.is_explored | np.array([state.has_equal_key for state in plan.decode], dtype=np.bool_),
        temperatures=temperatures.astype(np.float32),
    )


def num_selected(select: SelectBatch) -> int:
    """Drafts that a selection sends to verification, whatever the confidences are: so T is known before drafting."""
    num_forced = int(select.caps[select.is_forced].sum())
    return num_forced + min(select.num_admitted, int(select.caps.sum()) - num_forced)


def check_selection(select: SelectBatch, verify_lens: NDArray[np.int64]) -> None:
    """Raises EngineBuildError when a device broke the contract:
    its logits then belong to other drafts than is thought."""
    if verify_lens.shape == select.caps.shape and verify_lens.sum() == num_selected(select):
        lowest = np.where(select.is_forced, select.caps, 0)
        if ((lowest <= verify_lens) & (verify_lens <= select.caps)).all():
            return
    raise EngineBuildError(
        f"selection of drafts on the device: expected {num_selected(select)} drafts within the caps "
        f"{select.caps.tolist()} (forced: {select.is_forced.tolist()}), found verify_len {verify_lens.tolist()}; "
        "report this with the output of `dspark-trt doctor`"
    )


def harvest(segments: Sequence[Segment], nums_accepted: Sequence[int], logits: Any) -> None:
    """Hand every request that keeps trajectories what the target predicted behind the drafts that it rejected.

    nums_accepted: drafts of each segment; their tokens have been emitted. logits [L, V].
    """
    for segment, num_accepted in zip(segments, nums_accepted, strict=True):
        index, num_drafts = segment.state.token_index, len(segment.draft_ids)
        if not isinstance(index, TrajectoryIndex) or segment.first_logit is None or num_accepted >= num_drafts:
            continue
        first = segment.first_logit
        predicted_ids, are_finite = argmax_rows(logits, range(first + num_accepted + 1, first + num_drafts + 1))
        if all(are_finite):
            index.harvest(segment.draft_ids, num_accepted, predicted_ids)
