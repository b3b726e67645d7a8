"""What one step does with the token budget.

Shape letters: `R` requests that decode.

Everything in a StepPlan is fixed before anything is drafted: which requests decode, how many drafts of each may be
verified at most, which prompt tokens are read. The budget is max_batch_tokens: first one anchor for every request that
decodes, then prompts and drafts. Drafts leave prompts what they do not need, and never less than half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.draft_choice import DraftChoice
from dspark_trt.runtime.lookup import Lookup
from dspark_trt.runtime.prices import StepPrices
from dspark_trt.runtime.state import RequestState

MIN_CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next `num_tokens` of a prompt."""

    state: RequestState
    num_tokens: int

    @property
    def gives_token(self) -> bool:
        """Whether the token behind it is drawn from its last logits."""
        return self.num_tokens == self.state.num_unfilled and not self.state.is_read_again


@dataclass(frozen=True, slots=True)
class StepPlan:
    decode: list[RequestState]  # [R], those that draft first, then those whose drafts were looked up
    caps: NDArray[np.int64]  # [R] drafts verified at most; 0: has none
    num_offering: int  # requests that have drafts
    lookups: list[Lookup]  # of the requests behind those that draft
    is_explored: NDArray[np.bool_]  # [R] drafts in order to learn: verified at its cap
    num_slots: int  # n of the block that is drafted
    prefill: list[PrefillChunk]
    context_tokens: float  # mean of the positions that the requests of the step hold

    @property
    def num_drafting(self) -> int:
        """Requests that the drafter drafts for."""
        return self.num_offering - len(self.lookups)

    @property
    def drafting(self) -> list[RequestState]:
        return self.decode[: self.num_drafting]

    @property
    def offering(self) -> list[RequestState]:
        return self.decode[: self.num_offering]

    def num_proposed(self, index: int) -> int:
        """Drafts made for decode[index]."""
        if index < self.num_drafting:
            return self.num_slots
        return len(self.lookups[index - self.num_drafting].draft_ids) if index < self.num_offering else 0

    @property
    def states(self) -> list[RequestState]:
        """Everyone in the target's call, in the order of the segments."""
        return [*self.decode, *(chunk.state for chunk in self.prefill)]

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefill)

    @property
    def num_segments(self) -> int:
        return len(self.decode) + len(self.prefill)

    @property
    def num_extra_tokens(self) -> int:
        """Packed tokens beyond one a segment, without any draft."""
        return self.num_prefill_tokens - len(self.prefill)

    def verify_ms(self, prices: StepPrices, num_drafts: int) -> float:
        """Expected milliseconds of the target's call with so many drafts."""
        return prices.verify_drafts(self.num_segments, self.context_tokens, self.num_extra_tokens, num_drafts)

    def draft_ms(self, prices: StepPrices, num_ingested: int) -> float:
        """Expected milliseconds of the drafter's calls."""
        return prices.draft(self.num_drafting, self.num_slots, self.context_tokens, num_ingested)

    def step_ms(self, prices: StepPrices, max_drafts: int) -> NDArray[np.float64]:
        """Milliseconds of the planned step with 0 .. max_drafts drafts verified, [1 + max_drafts].

        The block is drafted by now: its time stands in every candidate, also in the one that verifies nothing.
        """
        first = self.num_extra_tokens
        drafted = self.draft_ms(prices, 0) + prices.drafting_host(self.num_drafting)
        return prices.with_drafts(self.num_segments, self.context_tokens, first, max_drafts) + drafted


def plan_step(
    decode: Sequence[RequestState],
    prompts: Sequence[RequestState],
    *,
    choice: DraftChoice,
    caps: NDArray[np.int64],
    lookups: Sequence[Lookup | None] = (),
    max_batch_tokens: int,
    max_prefill_tokens: int,
    context_tokens: float = 0.0,
) -> StepPlan:
    """Share the token budget. caps [R]: what each request may verify at most; `choice` says who drafts, and who takes
    the drafts of its entry in `lookups` [R].

    At most max_prefill_tokens go to prompts, so that those that decode are not held up.
    """
    wanted = np.where(choice.is_drafting, np.minimum(caps, choice.num_slots), 0)
    wanted = np.where(choice.is_looking_up, caps, wanted)
    room = max_batch_tokens - len(decode)
    num_unfilled = min(sum(state.num_unfilled for state in prompts), max_prefill_tokens)
    num_prefill_tokens = min(num_unfilled, max(room - int(wanted.sum()), (room + 1) // 2))
    levelled = level_down(wanted, room - num_prefill_tokens)
    order = np.argsort(np.where(levelled == 0, 2, np.where(choice.is_looking_up, 1, 0)), kind="stable")
    looking_up = [index for index in order.tolist() if levelled[index] and choice.is_looking_up[index]]
    return StepPlan(
        decode=[decode[index] for index in order],
        caps=levelled[order],
        num_offering=int(np.count_nonzero(levelled)),
        lookups=[lookup for index in looking_up if (lookup := lookups[index]) is not None],
        is_explored=choice.is_explored[order],
        num_slots=choice.num_slots,
        prefill=_chunks(prompts, num_prefill_tokens),
        context_tokens=context_tokens,
    )


def _chunks(prompts: Sequence[RequestState], num_tokens: int) -> list[PrefillChunk]:
    """Half of the tokens for the prompt that came first, the rest for those with the least left to read.

    So a long prompt always moves on, and short ones do not wait for it.
    """
    arrived = sorted(prompts, key=lambda prompt: prompt.generation)
    if not arrived or num_tokens <= 0:
        return []
    counts = dict.fromkeys(arrived, 0)
    first_share = num_tokens if len(arrived) == 1 else (num_tokens + 1) // 2
    counts[arrived[0]] = min(arrived[0].num_unfilled, first_share)
    left = num_tokens - counts[arrived[0]]
    for state in [*sorted(arrived[1:], key=lambda prompt: prompt.num_unfilled), arrived[0]]:
        more = min(state.num_unfilled - counts[state], left)
        counts[state] += more
        left -= more
    return [PrefillChunk(state, count) for state, count in counts.items() if count]


def max_prefill_tokens(
    prices: StepPrices | None, num_decode: int, context_tokens: float, *, max_batch_tokens: int, max_stretch: float
) -> int:
    """Prompt tokens beside requests that decode, so that a step takes at most max_stretch times a plain one.

    Never fewer than MIN_CHUNK_TOKENS: prompts move on.
    """
    room = max_batch_tokens - num_decode
    if prices is None or not num_decode or room <= 0:
        return max(room, 0)
    curve = prices.plain(num_decode, context_tokens, 0, room)
    within = int(np.searchsorted(curve, max_stretch * curve[0], side="right")) - 1
    return min(max(within, MIN_CHUNK_TOKENS), room)


def draft_cap(state: RequestState, max_verify_len: int) -> int:
    """Drafts of a request that may be verified. The bonus behind them is its last token, for which its row has room."""
    asked = state.request.max_verify_len
    return min(max_verify_len, state.num_remaining - 1, max_verify_len if asked is None else asked)


def level_down(caps: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """Lower the highest caps until they sum to at most `budget`; what is left over goes to the first of them."""
    if caps.sum() <= budget:
        return caps
    level = next(level for level in range(int(caps.max()), -1, -1) if np.minimum(caps, level).sum() <= budget)
    levelled = np.minimum(caps, level)
    raised = np.flatnonzero(caps > level)[: budget - int(levelled.sum())]
    levelled[raised] += 1
    return levelled
