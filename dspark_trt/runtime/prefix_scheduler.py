"""Chooses verify_len: how many drafts of each request are sent to verification in this step.

Shape letters: `R` requests, `G` gamma. Source: paper section 3.2.2, Algorithm 1; section 5.2; Appendix A.

What a decision may look at: admitting draft x_j of a request may use x_{<j}, the confidence of slot j (a function of
x_{<j}), other requests and the past, never x_j itself nor a later slot. All modes keep to that:
    off, fixed       nothing but `caps`, which are set before anything is drafted
    threshold        the first confidence below the threshold cuts, later ones are not read
    early_stop       drafts are admitted in order of survival until expected throughput falls for the first time
    lagged_budget    how many drafts are admitted is found by a full search over confidences two steps old; the fresh
                     ones only rank which
A full search over fresh confidences looks ahead and biases the output, so it does not exist here.

Where a StepEngine selects on the device, in `lagged_budget`, its decision is this one, made in two places. The host finds
K (`budget`) from an Offer, which is fixed before anything is drafted, and from survivals two steps old: nothing of the
block exists yet. The device ranks the fresh survivals and admits the first K. Survival never rises along a row and ties
go to the earlier slot, so whether x_j is among the first K depends on the row's confidences up to slot j, functions of
x_{<j}, and on other requests; neither x_j nor a later slot moves it. The fresh confidences come to the host when the
selection is made (`record`), and K sees them two steps later. `choose` does the same in one go.

Two live requests with equal random keys draw the same tokens: ranking one by the other's confidences would look ahead.
They are `forced`: verified up to their caps.

A drafter without a confidence head counts as survival 1 everywhere. The threshold then never cuts, and the adaptive
modes hand out whole slots breadth first, as many as the step table makes worth their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.errors import RecipeError
from dspark_trt.runtime.survival_history import Floats, Ints, SurvivalHistory


def calibrated_confidence(confidence_logits: NDArray[np.float32], temperatures: Floats) -> Floats:
    """sigmoid(logit / T_j) with the STS temperature of each slot; 0 where the logit is not finite. [R, G] (eq. 7)."""
    logits = confidence_logits.astype(np.float64)
    is_finite = np.isfinite(logits)
    confidence = np.tanh(0.5 * np.where(is_finite, logits, 0.0) / temperatures) * 0.5 + 0.5
    return np.where(is_finite, confidence, 0.0).astype(np.float64, copy=False)


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
    """What a step could verify, of the requests that draft: all of it is fixed before anything is drafted."""

    rows: Ints  # [R] KV rows
    generations: Ints  # [R] of their occupants
    caps: Ints  # [R] drafts verified at most
    is_forced: NDArray[np.bool_]  # [R] verified up to the cap
    num_requests: int  # requests that decode, those that do not draft included
    step_ms: Floats | None  # [1 + sum(caps)] of the step with so many drafts verified; for the adaptive modes

    @property
    def free_caps(self) -> Ints:
        """Drafts that compete for admission, [R]: none of a forced request."""
        return np.where(self.is_forced, 0, self.caps)

    def price(self, survival: Floats) -> tuple[float, Floats]:
        """Tokens expected without any competing draft, and milliseconds with 0, 1, 2, ... of them."""
        assert self.step_ms is not None, "the adaptive modes price steps"
        is_forced_slot = np.arange(survival.shape[1])[None, :] < (self.caps - self.free_caps)[:, None]
        return self.num_requests + float(survival[is_forced_slot].sum()), self.step_ms[int(is_forced_slot.sum()) :]


class PrefixScheduler:
    """Applies one SchedulerConfig, step after step."""

    def __init__(self, config: SchedulerConfig, *, temperatures: Sequence[float], num_rows: int) -> None:
        """`temperatures` [G] calibrate the confidences (STS). Raises RecipeError when they or the length do not fit."""
        gamma = len(temperatures)
        self.config = config
        self.temperatures = np.asarray(temperatures, dtype=np.float64)
        if not ((self.temperatures > 0) & np.isfinite(self.temperatures)).all():
            raise RecipeError(f"confidence temperatures: expected finite numbers > 0, found {list(temperatures)}")
        if config.verify_len is not None and config.verify_len > gamma:
            raise RecipeError(f"scheduler verify_len: expected at most gamma = {gamma}, found {config.verify_len}")
        self._history = SurvivalHistory(num_rows=num_rows, gamma=gamma)

    def move_row(self, source: int, destination: int) -> None:
        """A request moved to another KV row: its history follows."""
        self._history.move(source, destination)

    def choose(self, confidence_logits: NDArray[np.float32] | None, offer: Offer) -> Ints:
        """verify_len [R] of the requests that drafted. confidence_logits [R, G], None without a confidence head."""
        if self.config.mode in ("off", "fixed"):
            return offer.caps.copy()
        confidence = self._confidence(confidence_logits, offer)
        if self.config.mode == "threshold":
            assert self.config.threshold is not None, "checked by SchedulerConfig"
            return np.where(
                offer.is_forced, offer.caps, cut_at_threshold(confidence, offer.caps, self.config.threshold)
            )
        fresh = survival_of(confidence)
        requests, values = admission_order(fresh, offer.free_caps)
        if self.config.mode == "lagged_budget":
            num_admitted = self.budget(offer)
            self._history.record(offer.rows, offer.generations, fresh)
        else:
            num_admitted = early_stop_count(values, *offer.price(fresh))
        admitted = np.bincount(requests[:num_admitted], minlength=len(offer.caps))
        return np.where(offer.is_forced, offer.caps, admitted)

    def budget(self, offer: Offer) -> int:
        """K of `lagged_budget`: drafts that are admitted besides the forced ones. Reads nothing of this step's block."""
        stale = self._history.stale(offer.rows, offer.generations)
        _, values = admission_order(stale, offer.free_caps)
        return best_count(values, *offer.price(stale))

    def record(self, confidence_logits: NDArray[np.float32] | None, offer: Offer) -> None:
        """Hand in the confidences of the step whose `budget` was asked for; the budget sees them two steps later."""
        fresh = survival_of(self._confidence(confidence_logits, offer))
        self._history.record(offer.rows, offer.generations, fresh)

    def _confidence(self, confidence_logits: NDArray[np.float32] | None, offer: Offer) -> Floats:
        if confidence_logits is None:
            return np.ones((len(offer.rows), len(self.temperatures)))
        return calibrated_confidence(confidence_logits, self.temperatures)
