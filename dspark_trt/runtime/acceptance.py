"""Decides which drafts become tokens and draws the token behind them, so that the output is the target's own.

Shape letters: `A` requests still in their block, `V` vocabulary. Source: paper section 2.1.

Slot j, for every request at once that has accepted x_1 .. x_{j-1}:
    a draft x_j was verified    u < p_t(x_j) / p_d(x_j): accept it, on to slot j + 1
                                else draw from normalise(max(p_t - p_d, 0)), done
    none (left)                 draw from p_t, done: the bonus
A request without drafts, the first token after a prompt included, is a block of length 0. Greedy requests take the same
path: p_t is a point mass, and so is p_d of an argmax draft. Engines of a device decide all rows at once instead
(`runtime/fused_acceptance.py`); docs/architecture.md, "Acceptance", says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from dspark_trt.errors import RequestError
from dspark_trt.runtime.arrays import argmax_rows, index_array, take_rows, to_host
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.rng import Purpose, uniforms
from dspark_trt.runtime.sampling import (
    RESIDUAL_MASS_EPSILON,
    TopLogProbs,
    draw,
    is_greedy,
    log_probs,
    residual_weights,
    target_probs,
)
from dspark_trt.runtime.verification import Segment

Array = Any  # of the engine's library

NOT_FINITE_ERROR = "the target's logits are not finite at this position; the request cannot go on"


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

    @property
    def is_plain_argmax(self) -> bool:
        state = self.segment.state
        return is_greedy(state.params.temperature) and not state.processors.has_edits

    def push_argmax(self, token_id: int, logits: Array, slot: int) -> bool:
        """Push the token of this slot; whether it was drafted and the next slot follows."""
        self.push(token_id, logits, slot)
        if not self.has_draft(slot) or self.segment.draft_ids[slot] != token_id:
            return False
        self.result.num_accepted_drafts += 1
        return token_id not in self.segment.state.ending_ids

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
    plain = [trial for trial in inside if trial.is_plain_argmax]
    others = [trial for trial in inside if not trial.is_plain_argmax] if len(plain) < len(inside) else []
    return _decide_argmax(slot, plain, logits) + _decide_draws(slot, others, logits, block)


def _decide_argmax(slot: int, inside: list[_Trial], logits: Array) -> list[_Trial]:
    """Greedy requests whose logits nobody edits:
    a draft is accepted iff it is the argmax, which is the token anyway."""
    if not inside:
        return []
    rows = [trial.logit_row(slot) for trial in inside]
    token_ids, is_finite = argmax_rows(logits, rows)
    going_on = []
    for trial, token_id, finite in zip(inside, token_ids, is_finite, strict=True):
        if not finite:
            trial.result.error = NOT_FINITE_ERROR
        elif trial.push_argmax(token_id, logits, slot):
            going_on.append(trial)
    return going_on


def _decide_draws(slot: int, inside: list[_Trial], logits: Array, block: DraftBlock | None) -> list[_Trial]:
    if not inside:
        return []
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
            inside[at].result.error = NOT_FINITE_ERROR
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
    A draft that its own p_d excludes, or whose p_d is NaN, comes from a drafter out of order: it counts as not
    proposed, and the token is drawn from p_t. An argmax draft has p_d = 1.
    """
    tested = [at for at, trial in enumerate(inside) if trial.has_draft(slot)]
    if not tested:
        return set(), set()
    assert block is not None, "drafts come with their block"
    block_rows = [inside[at].segment.block_row for at in tested]
    draft_ids = [inside[at].segment.draft_ids[slot] for at in tested]
    is_drawn = block.temperatures[block_rows] > 0.0
    index = index_array([tested, draft_ids], probs)
    found = probs[index[0], index[1]]  # p_t of every tested draft, then p_d of those that were drawn
    drawn = np.flatnonzero(is_drawn).tolist()
    if drawn:
        drawn_rows = [block_rows[at] for at in drawn]
        draft_probs = block.draft_probs(slot, drawn_rows)
        found = array_namespace(probs).concat([found, block.prob_of_drafts(slot, drawn_rows, draft_probs)])
    on_host = to_host(found)
    p_t, p_d = on_host[: len(tested)], np.ones(len(tested), dtype=on_host.dtype)
    p_d[drawn] = on_host[len(tested) :]
    tests = np.array([inside[at].uniform(slot, Purpose.ACCEPT) for at in tested])
    is_proposed = p_d > 0
    is_accepted = is_proposed & (tests * p_d < p_t)
    is_rejected = is_proposed & ~is_accepted
    rejected_draws = [(tested[at], order) for order, at in enumerate(drawn) if is_rejected[at]]
    if rejected_draws:
        index = index_array([list(pair) for pair in zip(*rejected_draws, strict=True)], probs)
        vocabulary = None if block.vocabulary is None else block.vocabulary.ids
        probs[index[0], :] = residual_weights(probs[index[0], :], draft_probs[index[1], :], vocabulary)
    rejected_argmax = np.flatnonzero(is_rejected & ~is_drawn).tolist()
    if rejected_argmax:
        index = index_array([[tested[at] for at in rejected_argmax], [draft_ids[at] for at in rejected_argmax]], probs)
        without = take_rows(probs, [tested[at] for at in rejected_argmax])
        without[index_array(list(range(len(rejected_argmax))), without), index[1]] = 0.0
        xp = array_namespace(probs)
        has_mass = xp.sum(without, axis=-1, keepdims=True) > RESIDUAL_MASS_EPSILON
        probs[index[0], :] = xp.where(has_mass, without, probs[index[0], :])
    at_of = np.asarray(tested)
    return set(at_of[is_accepted].tolist()), set(at_of[is_rejected].tolist())
