"""Decides, before anything is drafted, how many slots are drafted and for which requests:
never slower than not drafting.

Shape letters: `R` requests that decode, `Q` blocks expected of a request, `G` gamma, `K` drafts verified.

Everything it reads is past: survivals of blocks at least two steps old, prices, caps. Drafting is worth its time where

    max over K of  tau(K) / (host + draft + step(R + K))   >   R / (host + step(R))

tau(K): the K Q best drafts of all requests' Q equally likely blocks, spread over Q steps. docs/scheduling.md says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.corrections import RealisedGain
from dspark_trt.runtime.draft_choice import Decoding, DraftChoice
from dspark_trt.runtime.prices import StepPrices
from dspark_trt.runtime.survival_history import NUM_QUANTILES, Floats, Ints, SurvivalHistory

MIN_GAIN = 0.03  # expected throughput must rise by so much before drafting begins
KEPT_GAIN = 0.01  # and by so much for it to go on
EXPLORATION_SHARE = 0.005  # of the time of steps may be lost by looking again at drafts that are not worth it now
FIRST_LOOK_SHARE = 0.1  # of a request's part of a step, for each request that nothing is known of
STEPS_BETWEEN_LOOKS = 4
LEAST_LOSS_SHARE = 0.1  # of what a look costs counts as lost, however good it promises to be
NUM_EXPLORED_SLOTS = 2
MAX_STEPS_BETWEEN_CHOICES = 4  # the same requests need no new choice for so many steps
MAX_IDLE_STEPS = 16  # nor where nobody drafts: there is little news then
STAIR_GAIN = 0.01  # by so much more than early stopping reaches, a planned number of drafts is verified
POSITIONS_OF_A_STEP = 2  # that enter a context in each step of a request that drafts, about
STEPS_SERVED = 32  # by bringing a context up that has waited
_NO_LOOKUPS = np.empty((0, 0))


class DraftPolicy:
    """One choice a step."""

    def __init__(
        self,
        prices: StepPrices,
        history: SurvivalHistory,
        *,
        num_rows: int,
        slot_counts: Sequence[int],
        stops_early: bool = True,
    ) -> None:
        """`slot_counts`: how many slots a block may have, ascending. `stops_early`: the mode is early_stop."""
        self._stops_early = stops_early
        self._prices = prices
        self._history = history
        self._slot_counts = slot_counts
        self.realised = RealisedGain()
        self._credit_ms = 0.0
        self._num_steps = 0
        self._seen_at = np.zeros(num_rows, dtype=np.int64)  # the step in which a row's drafts were verified last
        self._seen_generation = np.full(num_rows, -1, dtype=np.int64)
        self._last: DraftChoice | None = None
        self._last_promise = np.empty(0)  # [R] drafts expected to survive of each request's block, in that choice
        self._last_key = b""
        self._num_kept = 0

    def choose(self, step: Decoding, lookup_survival: Floats | None = None) -> DraftChoice:
        """Who drafts in this step, and how many slots. lookup_survival [R, G]: 0 where nothing was found.

        A request takes its lookup, which costs nothing, where that promises more than a block of the drafter.
        """
        self._num_steps += 1
        num_requests = len(step.rows)
        if not num_requests or not step.caps.any():
            return DraftChoice.nobody(num_requests)
        if lookup_survival is None:
            return self._with_explored(step, self._best_or_last(step, _NO_LOOKUPS))
        found = lookup_survival.sum(axis=1)
        choice = self._best_or_last(step, lookup_survival)
        is_better = found > self._last_promise
        if is_better.any():
            choice = choice.without(is_better)
        choice = self._with_explored(step, choice, is_excluded=is_better)
        if not choice.num_slots and not self._pays_to_copy(step, lookup_survival):
            return choice
        return replace(choice, is_looking_up=(found > 0) & ~choice.is_drafting)

    def _pays_to_copy(self, step: Decoding, lookup_survival: Floats) -> bool:
        """Whether copies, in a step that drafts nothing, bring more than their time outside the engines."""
        num_requests = len(step.rows)
        values = -np.sort(-lookup_survival[lookup_survival > 0])
        steps_ms = self._prices.with_drafts(num_requests, step.context_tokens, 0, len(values))
        with_copies = (num_requests + np.cumsum(values)) / (steps_ms[1:] + self._prices.lookup_host(num_requests))
        return float(with_copies.max()) > num_requests / float(steps_ms[0])

    def _with_explored(
        self, step: Decoding, choice: DraftChoice, *, is_excluded: NDArray[np.bool_] | None = None
    ) -> DraftChoice:
        if self._num_steps % STEPS_BETWEEN_LOOKS == 0:
            may_explore = step.caps > 0 if is_excluded is None else (step.caps > 0) & ~is_excluded
            choice = self._explore(step, choice, may_explore=may_explore)
        if choice.num_slots:
            self._seen_at[step.rows[choice.is_drafting]] = self._num_steps
        return choice

    def move_row(self, source: int, destination: int) -> None:
        self._seen_at[destination] = self._seen_at[source]
        self._seen_generation[destination] = self._seen_generation[source]

    def _best_or_last(self, step: Decoding, lookup_survival: Floats) -> DraftChoice:
        key = step.generations.tobytes()
        most = MAX_STEPS_BETWEEN_CHOICES if self._last is not None and self._last.num_slots else MAX_IDLE_STEPS
        if self._last is None or key != self._last_key or self._num_kept >= most:
            self._last, self._last_key, self._num_kept = self._best(step, lookup_survival), key, 0
        elif lookup_survival.any():  # what was expected of that step is not expected of this one
            self._last = replace(self._last, tokens_per_ms=0.0)
        self._num_kept += 1
        return self._last

    def _best(self, step: Decoding, lookup_survival: Floats) -> DraftChoice:
        """The choice of greatest expected throughput."""
        num_requests, gamma = len(step.rows), self._slot_counts[-1]
        survival = self._history.expected(step.rows, step.generations)[:, :, :gamma]  # [R, Q, G]
        survival *= (np.arange(gamma) < step.caps[:, None])[:, None, :]
        self._last_promise = promise = survival.mean(axis=1).sum(axis=1)
        order = np.argsort(-promise, kind="stable")
        may_draft = step.caps > 0
        if len(lookup_survival):
            may_draft &= lookup_survival.sum(axis=1) <= promise
        order = order[may_draft[order]]
        context = step.context_tokens
        steps_ms = self._prices.with_drafts(num_requests, context, 0, num_requests * gamma)
        without_drafter = np.append(num_requests, num_requests + np.cumsum(-np.sort(-lookup_survival, axis=None)))
        without_drafter = without_drafter[: len(steps_ms)]
        plain = float((without_drafter / steps_ms[: len(without_drafter)]).max())
        was_drafting = self._last is not None and self._last.num_slots > 0
        threshold = plain * (1.0 + (KEPT_GAIN if was_drafting else MIN_GAIN))
        # what is expected is compared by what it has been worth so far
        best, best_slots, best_count = threshold / self.realised.factor(num_requests), 0, 0
        best_planned = 0
        last, num_falls = 0.0, 0
        for count in _halved(len(order)):
            chosen = order[:count]
            looked_up = lookup_survival
            if len(lookup_survival):
                looked_up = np.repeat(np.delete(lookup_survival, chosen, axis=0), NUM_QUANTILES)
                looked_up = looked_up[looked_up > 0]
            pending = _priced_pending(step.num_pending[chosen])
            host = self._prices.drafting_host(count)
            before = of_count = 0.0
            for num_slots in self._slot_counts:
                values = -np.sort(-np.append(survival[chosen, :, :num_slots], looked_up))
                tokens = num_requests + np.cumsum(values)[NUM_QUANTILES - 1 :: NUM_QUANTILES] / NUM_QUANTILES
                tokens = tokens[: len(steps_ms) - 1]
                cost = steps_ms[: len(tokens) + 1] + (self._prices.draft(count, num_slots, context, pending) + host)
                throughput, num_planned = self._reached(np.concatenate(([num_requests], tokens)) / cost)
                if throughput > best:
                    best, best_slots, best_count, best_planned = throughput, num_slots, count, num_planned
                of_count = max(of_count, throughput)
                if throughput < before:  # further slots survive even less
                    break
                before = throughput
            num_falls = num_falls + 1 if of_count < last else 0
            if num_falls == 2:  # with ever fewer requests that draft it only falls further
                break
            last = of_count
        if not best_slots:
            return DraftChoice.nobody(num_requests)
        is_drafting = np.zeros(num_requests, dtype=np.bool_)
        is_drafting[order[:best_count]] = True
        none = np.zeros(num_requests, dtype=np.bool_)
        return DraftChoice(best_slots, is_drafting, none, none, best, best_planned)

    def _reached(self, throughput: NDArray[np.float64]) -> tuple[float, int]:
        """What the scheduler gets of the throughputs with 0, 1, 2, ... drafts, and how many are planned for that.

        Early stopping ends at the first that falls, which may be a stair of the prices. Where more lies behind it, so
        many drafts are planned: a number from the past, as that of `lagged_budget`.
        """
        most = int(throughput.argmax())
        if not self._stops_early:
            return float(throughput[most]), 0
        falls = np.flatnonzero(throughput[1:] <= throughput[:-1])
        stop = int(falls[0]) if len(falls) else len(throughput) - 1
        if throughput[most] > throughput[stop] * (1.0 + STAIR_GAIN):
            return float(throughput[most]), most
        return float(throughput[stop]), 0

    def _explore(self, step: Decoding, choice: DraftChoice, *, may_explore: NDArray[np.bool_]) -> DraftChoice:
        """Add the request whose drafts were seen longest ago, when enough time has been saved up for it."""
        if choice.is_drafting.all():
            return choice
        is_new = self._seen_generation[step.rows] != step.generations
        self._seen_generation[step.rows] = step.generations
        self._seen_at[step.rows[is_new]] = 0  # before all that have been seen
        few = min(each for each in self._slot_counts if each >= min(NUM_EXPLORED_SLOTS, self._slot_counts[-1]))
        num_slots = choice.num_slots or few
        steps_ms = self._prices.with_drafts(len(step.rows), step.context_tokens, 0, num_slots)
        plain_ms = float(steps_ms[0])
        first_looks = FIRST_LOOK_SHARE * int(is_new.sum()) / len(step.rows)
        self._credit_ms += (EXPLORATION_SHARE * STEPS_BETWEEN_LOOKS + first_looks) * plain_ms
        idle = np.flatnonzero(~choice.is_drafting & may_explore)
        if not len(idle):
            return choice
        explored = int(idle[np.argmin(self._seen_at[step.rows[idle]])])
        drafting = int(choice.is_drafting.sum())
        cost = float(steps_ms[-1] - steps_ms[0]) + self._prices.draft(
            drafting + 1, num_slots, step.context_tokens, int(step.num_pending[explored])
        )
        cost -= self._prices.draft(drafting, num_slots, step.context_tokens, 0)
        cost += self._prices.drafting_host(drafting + 1) - self._prices.drafting_host(drafting)
        promise = self._history.expected(step.rows[[explored]], step.generations[[explored]])[0, :, :num_slots]
        value = float(promise.mean(axis=0).sum()) * plain_ms / len(step.rows)
        loss = max(cost - value, LEAST_LOSS_SHARE * cost)
        if self._credit_ms < loss:
            return choice
        self._credit_ms -= loss
        is_drafting, is_explored = choice.is_drafting.copy(), choice.is_explored.copy()
        is_drafting[explored] = is_explored[explored] = True
        return DraftChoice(num_slots, is_drafting, is_explored, choice.is_looking_up, num_planned=choice.num_planned)


def _priced_pending(num_pending: Ints) -> int:
    """Positions that a step which drafts is charged for, of those that its requests' contexts lack.

    What has waited while nobody drafted is brought up once and serves all steps from there on: charged to one of them,
    it would keep a request that once did not draft from ever drafting.
    """
    of_a_step = np.minimum(num_pending, POSITIONS_OF_A_STEP)
    return int(of_a_step.sum() + (num_pending - of_a_step).sum() // STEPS_SERVED)


def _halved(count: int) -> list[int]:
    """count, half of it, a quarter ... 1."""
    counts = []
    while count:
        counts.append(count)
        count //= 2
    return counts
