"""Decides which drafts become tokens and draws the token behind them, so that the output is the target's own.

Shape letters: `A` requests still in their block, `V` vocabulary. Source: paper section 2.1.

Slot j, for every request at once that has accepted x_1 .. x_{j-1}:
    a draft x_j was verified    u < p_t(x_j) / p_d(x_j): accept it, on to slot j + 1
                                else draw from normalise(max(p_t - p_d, 0)), done
    none (left)                 draw from p_t, done: the bonus
A request without drafts, the first token after a prompt included, is a block of length 0. Greedy requests take the same
path: p_t is a point mass, and so is p_d of an argmax draft. Slots are evaluated one after the other because most rows
behind a rejection would be computed for nothing. Where arrays live on a device, the host waits for it a few times per slot,
for all requests together; for single requests only where they ask for log probabilities, bad_words or min_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from dspark_trt.errors import RequestError
from dspark_trt.runtime.arrays import index_array, take_rows, to_host
from dspark_trt.runtime.drafting import DraftBlock, PendingTaps
from dspark_trt.runtime.rng import Purpose, uniforms
from dspark_trt.runtime.sampling import TopLogProbs, draw, log_probs, residual_weights, target_probs
from dspark_trt.runtime.state import Phase
from dspark_trt.runtime.verification import Segment

Array = Any  # of the engine's library


@dataclass(slots=True)
class Acceptance:
    """What one step decided for one request."""

    token_ids: list[int] = field(default_factory=list)  # accepted drafts, then the drawn token unless a draft ended it
    num_accepted_drafts: int = 0
    log_probs: list[float] = field(default_factory=list)  # of each token, where the request asked for them
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    error: str | None = None  # fit for a client

    def num_committed(self, segment: Segment) -> int:
        """Positions of the segment that are valid from now on: prompt tokens, or the anchor and the accepted drafts."""
        if self.error:
            return 0
        return segment.num_tokens if segment.is_prefill else 1 + self.num_accepted_drafts


def accept(segments: Sequence[Segment], logits: Array, block: DraftBlock | None) -> list[Acceptance]:
    """One Acceptance for each segment; an empty one where a prompt goes on. logits [L, V], raw.

    Every token is pushed to its request's processors at once: the next slot's distribution depends on it. A request
    whose logits are not finite, or whose every token is masked, fails alone.
    """
    trials = [_Trial(segment) for segment in segments]
    inside, slot = [trial for trial in trials if trial.segment.first_logit is not None], 0
    while inside:
        inside = _decide_slot(slot, inside, logits, block)
        slot += 1
    return [trial.result for trial in trials]


@dataclass(slots=True)
class _Trial:
    """One request's way through its block."""

    segment: Segment
    result: Acceptance = field(default_factory=Acceptance)

    def has_draft(self, slot: int) -> bool:
        return slot < len(self.segment.draft_ids)

    def logit_row(self, slot: int) -> int:
        assert self.segment.first_logit is not None, "only segments with logits are decided"
        return self.segment.first_logit + slot

    def uniform(self, slot: int, purpose: Purpose) -> float:
        return float(uniforms(self.segment.state.words[slot, purpose]))

    def push(self, token_id: int, logits: Array, slot: int) -> None:
        state = self.segment.state
        state.processors.push(token_id)
        self.result.token_ids.append(token_id)
        if state.params.num_log_probs is not None:
            raw = logits[self.logit_row(slot), :]
            log_prob, top_log_probs = log_probs(raw, token_id, state.params.num_log_probs)
            self.result.log_probs.append(log_prob)
            self.result.top_log_probs.append(top_log_probs)


def _decide_slot(slot: int, inside: list[_Trial], logits: Array, block: DraftBlock | None) -> list[_Trial]:
    """Slot `slot` + 1 of the requests `inside`; returns those that go on to the next one."""
    inside, rows = _next_token_logits(slot, inside, logits)
    if not inside:
        return []
    probs = target_probs(rows, [trial.segment.state.params for trial in inside])
    accepted, rejected = _test_drafts(slot, inside, probs, block)
    ending = [at for at in range(len(inside)) if at not in accepted]
    if ending:
        draws = [inside[at].uniform(slot, Purpose.RESIDUAL if at in rejected else Purpose.BONUS) for at in ending]
        weights = probs if len(ending) == len(inside) else take_rows(probs, ending)
        for at, token_id in zip(ending, draw(weights, draws), strict=True):
            inside[at].push(token_id, logits, slot)
    going_on = []
    for at in sorted(accepted):
        trial = inside[at]
        token_id = trial.segment.draft_ids[slot]
        trial.push(token_id, logits, slot)
        trial.result.num_accepted_drafts += 1
        if token_id not in trial.segment.state.ending_ids:
            going_on.append(trial)
    return going_on


def _next_token_logits(slot: int, inside: list[_Trial], logits: Array) -> tuple[list[_Trial], Array]:
    """Edited logits of the slot, [A, V], a copy, for the requests that do not fail on them."""
    rows = take_rows(logits, [trial.logit_row(slot) for trial in inside])
    xp = array_namespace(rows)
    kept = []
    for at, is_finite in enumerate(to_host(xp.all(xp.isfinite(rows), axis=-1)).tolist()):
        state = inside[at].segment.state
        if not is_finite:
            inside[at].result.error = "the target's logits are not finite at this position; the request cannot go on"
            continue
        try:
            if state.processors.has_edits:
                state.processors.edit(rows[at, :])
        except RequestError as error:
            inside[at].result.error = str(error)
            continue
        kept.append(at)
    if len(kept) == len(inside):
        return inside, rows
    return [inside[at] for at in kept], take_rows(rows, kept)


def _test_drafts(slot: int, inside: list[_Trial], probs: Array, block: DraftBlock | None) -> tuple[set[int], set[int]]:
    """Positions in `inside` whose draft is accepted, and those whose draft is rejected.

    The rows of `probs` (p_t) that belong to a rejection are replaced by the residual, in place.
    A draft that its own p_d excludes, or whose p_d is NaN, comes from a drafter out of order: it counts as not proposed,
    and the token is drawn from p_t.
    """
    tested = [at for at, trial in enumerate(inside) if trial.has_draft(slot)]
    if not tested:
        return set(), set()
    assert block is not None, "drafts come with their block"
    xp = array_namespace(probs)
    draft_ids = [inside[at].segment.draft_ids[slot] for at in tested]
    draft_probs = block.draft_probs(slot, [inside[at].segment.block_row for at in tested])
    index = index_array([tested, draft_ids], probs)
    p_d_of_drafts = draft_probs[xp.arange(len(tested), device=device(probs)), index[1]]
    p_d, p_t = to_host(xp.stack([p_d_of_drafts, probs[index[0], index[1]]]))
    tests = np.array([inside[at].uniform(slot, Purpose.ACCEPT) for at in tested])
    is_proposed = p_d > 0
    is_accepted = is_proposed & (tests * p_d < p_t)
    rejections = np.flatnonzero(is_proposed & ~is_accepted).tolist()
    rejected = [tested[index] for index in rejections]
    if rejected:
        index = index_array([rejected, rejections], probs)
        probs[index[0], :] = residual_weights(probs[index[0], :], draft_probs[index[1], :])
    return {tested[index] for index in np.flatnonzero(is_accepted).tolist()}, set(rejected)


def pending_taps(segments: Sequence[Segment], results: Sequence[Acceptance], taps: Array) -> PendingTaps | None:
    """A copy of the taps [T, M*D] at the positions that were just committed, for the requests that go on drafting."""
    kept = [
        (segment, result.num_committed(segment))
        for segment, result in zip(segments, results, strict=True)
        if segment.state.phase is not Phase.FINISHED and segment.state.may_draft
    ]
    if not kept:
        return None
    tokens = [np.arange(segment.first_token, segment.first_token + count) for segment, count in kept]
    return PendingTaps(
        states=[segment.state for segment, _ in kept],
        num_positions=[count for _, count in kept],
        taps=take_rows(taps, np.concatenate(tokens)),
    )
