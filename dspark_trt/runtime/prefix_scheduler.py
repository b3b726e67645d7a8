"""Chooses verify_len: how many drafts of each request are sent to verification in this step.

Shape letters: `R` requests, `n` slots drafted. Source: paper section 3.2.2, Algorithm 1; section 5.2; Appendix A.

The rule: admitting draft x_j of a request may use x_{<j}, the confidence of slot j (a function of x_{<j}), other
requests and the past, never x_j itself nor a later slot. docs/architecture.md says how each mode keeps to it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.scheduler import SchedulerConfig, SchedulerMode
from dspark_trt.errors import RecipeError
from dspark_trt.runtime.corrections import AcceptanceCorrection
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.survival_history import Floats, Ints, SurvivalHistory
from dspark_trt.steptable.table import StepTable

logger = logging.getLogger(__name__)


def survival_of(confidence: Floats) -> Floats:
    """a_{r,j} = prod_{i <= j} c_{r,i}, [R, G]; never rises along a row."""
    survival: Floats = np.cumprod(confidence, axis=1, dtype=np.float64)
    return survival


def cut_at_threshold(confidence: Floats, caps: Ints, threshold: float) -> Ints:
    """Drafts before the first confidence below `threshold`, at most `caps`. [R]"""
    num_kept: Ints = np.cumprod(confidence >= threshold, axis=1, dtype=np.int64).sum(axis=1)
    return np.minimum(num_kept, caps)


def admission_order(survival: Floats, caps: Ints) -> tuple[Ints, Floats]:
    """The drafts (r, j) with j <= caps[r] by falling survival, ties by (j, r).

    Returns the request of each, [N], and its survival, [N]. Survival never rises along a row and ties go to the earlier
    slot, so every beginning of this order is made of prefixes.
    """
    slots, requests = np.nonzero(np.arange(survival.shape[1])[:, None] < caps[None, :])  # by (j, r)
    values = survival[requests, slots]
    order = np.argsort(-values, kind="stable")
    return requests[order], values[order]


def early_stop_count(values: Floats, num_tokens: float, step_ms: Floats) -> int:
    """Drafts admitted before expected throughput does not rise for the first time (Algorithm 1). See `_throughput`."""
    throughput = _throughput(values, num_tokens, step_ms)
    stops = np.flatnonzero(throughput[1:] <= throughput[:-1])
    return int(stops[0]) if len(stops) else len(values)


def best_count(values: Floats, num_tokens: float, step_ms: Floats) -> int:
    """The number of drafts of greatest expected throughput, the smallest on ties. Only for survivals of the past."""
    return int(np.argmax(_throughput(values, num_tokens, step_ms)))


def _throughput(values: Floats, num_tokens: float, step_ms: Floats) -> Floats:
    """Expected tokens per millisecond with 0 .. N drafts admitted, [N + 1].

    values: survival in order of admission, [N]. num_tokens: tokens expected without any of them. step_ms: milliseconds
    of the step with 0 .. N of them, [N + 1] or more.
    """
    return (num_tokens + np.concatenate(([0.0], np.cumsum(values)))) / step_ms[: len(values) + 1]


@dataclass(frozen=True, slots=True)
class Offer:
    """What a step could verify, of the requests that have drafts: all of it is fixed before anything is drafted.

    Those that the drafter drafts for come first.
    """

    rows: Ints  # [R] KV rows
    generations: Ints  # [R] of their occupants
    caps: Ints  # [R] drafts verified at most
    is_forced: NDArray[np.bool_]  # [R] verified up to the cap
    num_requests: int  # requests that decode, those that do not draft included
    step_ms: Floats | None  # [1 + sum(caps)] of the step with so many drafts verified; for the adaptive modes
    is_greedy: NDArray[np.bool_]  # [R] which line of the calibration holds
    lookup_survival: Floats | None = None  # [R of those that look up, G], known beforehand; None: all draft

    @property
    def num_drafting(self) -> int:
        return len(self.rows) - (0 if self.lookup_survival is None else len(self.lookup_survival))

    @property
    def free_caps(self) -> Ints:
        """Drafts that compete for admission, [R]: none of a forced request."""
        return np.where(self.is_forced, 0, self.caps) if self.is_forced.any() else self.caps

    def price(self, survival: Floats) -> tuple[float, Floats]:
        """Tokens expected without any competing draft, and milliseconds with 0, 1, 2, ... of them."""
        assert self.step_ms is not None, "the adaptive modes price steps"
        if not self.is_forced.any():
            return float(self.num_requests), self.step_ms
        is_forced_slot = np.arange(survival.shape[1])[None, :] < (self.caps - self.free_caps)[:, None]
        return self.num_requests + float(survival[is_forced_slot].sum()), self.step_ms[int(is_forced_slot.sum()) :]


class PrefixScheduler:
    """Applies one SchedulerConfig, step after step."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        calibration: Calibration,
        history: SurvivalHistory,
        acceptance: AcceptanceCorrection,
        expected_survival: Floats,
    ) -> None:
        """`expected_survival` [G] stands for slots that a short block does not have.

        Raises RecipeError when the length does not fit the drafter.
        """
        if config.verify_len is not None and config.verify_len > calibration.gamma:
            raise RecipeError(
                f"scheduler: expected at most gamma = {calibration.gamma} drafts, found fixed:{config.verify_len}"
            )
        self.config = config
        self._calibration = calibration
        self._history = history
        self._acceptance = acceptance
        self._is_recorded = True  # there is no step before the first
        self._conditional = expected_survival / np.concatenate(([1.0], np.maximum(expected_survival[:-1], 1e-6)))

    @property
    def gamma(self) -> int:
        return self._calibration.gamma

    @property
    def temperatures(self) -> Floats:
        """T_j [G] of requests that sample: what a device ranks by."""
        return 1.0 / np.asarray(self._calibration.sampled.slopes)

    def confidence(self, block: DraftBlock, is_greedy: NDArray[np.bool_]) -> Floats:
        """P(draft j accepted given those before), calibrated and corrected, [R, n] (eq. 7)."""
        return self._calibration.confidence(block.confidence_logits, is_greedy, self._acceptance.shifts)

    def choose(self, confidence: Floats, offer: Offer, num_planned: int = 0) -> Ints:
        """verify_len [R] of the requests that have drafts. confidence [R, n].

        num_planned: drafts that `early_stop` admits, besides the forced ones, in place of stopping early: a number that
        was fixed before anything was drafted. 0: it stops early.
        """
        if self.config.mode in ("off", "fixed"):
            return offer.caps.copy()
        if self.config.mode == "threshold":
            assert self.config.threshold is not None, "checked by SchedulerConfig"
            return np.where(
                offer.is_forced, offer.caps, cut_at_threshold(confidence, offer.caps, self.config.threshold)
            )
        fresh = survival_of(confidence)
        requests, values = admission_order(fresh, offer.free_caps)
        if self.config.mode == "lagged_budget":
            num_admitted = self.budget(offer)
        elif num_planned:
            num_admitted = num_planned
        elif offer.num_drafting:
            num_admitted = early_stop_count(values, *offer.price(fresh))
        else:  # nothing is fresh: what is known of lookups was known before
            num_admitted = best_count(values, *offer.price(fresh))
        admitted = np.bincount(requests[:num_admitted], minlength=len(offer.caps))
        return np.where(offer.is_forced, offer.caps, admitted)

    def budget(self, offer: Offer) -> int:
        """K of `lagged_budget`: drafts that are admitted besides the forced ones.
        Reads nothing of this step's block."""
        drafting = slice(offer.num_drafting)
        stale = self._history.stale(offer.rows[drafting], offer.generations[drafting])
        if offer.lookup_survival is not None:
            stale = np.concatenate((stale, offer.lookup_survival))
        _, values = admission_order(stale, offer.free_caps)
        return best_count(values, *offer.price(stale))

    def record(self, fresh: Floats, offer: Offer) -> None:
        """Hand in this step's survivals [R of those that drafted, n]; slots behind n are taken to survive as they do on
        average."""
        num_slots, drafting = fresh.shape[1], slice(offer.num_drafting)
        behind = fresh[:, -1:] * np.cumprod(self._conditional[num_slots:])
        survival = np.concatenate((fresh, behind), axis=1)
        self._history.record(offer.rows[drafting], offer.generations[drafting], survival)
        self._is_recorded = True

    def advance(self) -> None:
        """A step begins. One that drafted nothing still makes the survivals of those before it a step older."""
        if not self._is_recorded:
            self._history.record_nothing()
        self._is_recorded = False

    def move_row(self, source: int, destination: int) -> None:
        """A request moved to another KV row: its history follows."""
        self._history.move(source, destination)


def mode_for(table: StepTable, selects_on_device: bool) -> SchedulerMode:
    """What `auto` is: `early_stop` where every token has its price, else or where a device selects `lagged_budget`."""
    mode: SchedulerMode = "early_stop" if table.is_smooth and not selects_on_device else "lagged_budget"
    why = (
        "the device selects drafts itself"
        if selects_on_device
        else f"calls {'have as many tokens as they need' if table.is_smooth else 'are padded to buckets'}"
    )
    logger.info("scheduler auto: %s, since %s; not drafting is one of its choices", mode, why)
    return mode
