"""Steps without engines: the deciders that serve, on blocks drawn from an acceptance profile, priced by a step table.

Shape letters: `R` requests, `G` gamma.

A block's confidences are its positions' mean acceptance, shifted in logits by what differs between requests and between
blocks; they are honest: a draft is accepted with exactly that probability. Prompts are not simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark_trt.calibration.file import CALIBRATION_FILE, load_calibration
from dspark_trt.contract.calibration import Calibration, blocks_around
from dspark_trt.contract.drafter_form import slot_counts
from dspark_trt.contract.scheduler import SchedulerConfig, parse_scheduler
from dspark_trt.runtime.corrections import AcceptanceCorrection, TimeCorrection
from dspark_trt.runtime.draft_choice import Decoding, DraftChoice
from dspark_trt.runtime.draft_policy import DraftPolicy
from dspark_trt.runtime.prefix_scheduler import Offer, PrefixScheduler, survival_of
from dspark_trt.runtime.prices import StepPrices
from dspark_trt.runtime.survival_history import SurvivalHistory
from dspark_trt.steptable.table import StepTable

WARM_UP_SHARE = 0.2  # of the steps: the history is not full yet


@dataclass(frozen=True, slots=True)
class Prediction:
    """One mode under one load."""

    mode: str
    concurrency: int
    tokens_per_s: float
    user_tokens_per_s: float
    mean_verify_len: float
    accepted_len: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_source(source: Path) -> tuple[StepTable, tuple[float, ...]]:
    """A build's step table and the conditional acceptance that its calibration saw; () of a table alone and of a build
    whose drafts are copied: what they bring depends on the text.

    Raises ManifestError.
    """
    if not source.is_dir():
        return StepTable.load(source), ()
    from dspark_trt.building.finished import read_finished
    from dspark_trt.checkpoints.spec_json import read_draft_source

    table = StepTable.load(source / "steptable" / "step_table.json")
    if not read_finished(source)[0].recipe.has_drafter_model:
        return table, ()
    gamma = read_draft_source(source).gamma
    calibration = load_calibration(source / "calibration" / CALIBRATION_FILE, gamma=gamma).calibration
    survival = calibration.expected_survival
    conditional = survival / np.concatenate(([1.0], np.maximum(survival[:-1], 1e-9)))
    return table, tuple(np.clip(conditional, 0, 1).tolist())


def simulate_load(
    table: StepTable,
    chances: Sequence[float],
    mode: str,
    concurrency: int,
    *,
    context_tokens: float,
    spread: float,
    num_steps: int,
    seed: int = 0,
) -> Prediction:
    """chances [G]: mean conditional acceptance by position. Raises RecipeError when the mode does not fit G."""
    random = np.random.default_rng([seed, concurrency])
    deciders = _Deciders(table, chances, mode, concurrency, context_tokens)
    gamma = len(chances)
    clipped = np.clip(np.array(chances), 1e-6, 1 - 1e-6)
    logits = np.log(clipped / (1 - clipped))
    request_shift = random.normal(scale=spread / 2**0.5, size=(concurrency, 1))
    total_ms = num_tokens = num_drafts = num_counted = 0.0
    for step in range(num_steps):
        shift = request_shift + random.normal(scale=spread / 2**0.5, size=(concurrency, 1))
        confidence = 1 / (1 + np.exp(-(logits + shift))) if spread else np.tile(clipped, (concurrency, 1))
        verify_lens, step_ms = deciders.step(confidence)
        is_accepted = random.random((concurrency, gamma)) < confidence
        num_accepted = np.minimum(np.cumprod(is_accepted, axis=1).sum(axis=1), verify_lens)
        deciders.learn(concurrency + float(num_accepted.sum()), step_ms)
        if step >= WARM_UP_SHARE * num_steps:
            total_ms += step_ms
            num_tokens += concurrency + float(num_accepted.sum())
            num_drafts += float(verify_lens.sum())
            num_counted += concurrency
    rate = 1e3 * num_tokens / total_ms
    return Prediction(mode, concurrency, rate, rate / concurrency, num_drafts / num_counted, num_tokens / num_counted)


class _Deciders:
    """The policy and the prefix scheduler of one loop."""

    def __init__(
        self, table: StepTable, chances: Sequence[float], mode: str, concurrency: int, context_tokens: float
    ) -> None:
        self._gamma = gamma = len(chances)
        config = parse_scheduler(mode)
        survival = np.cumprod(np.asarray(chances))
        neutral = Calibration.from_temperatures([1.0] * gamma)
        self._prices = StepPrices(table, TimeCorrection(is_on=False))
        history = SurvivalHistory(num_rows=concurrency, gamma=gamma, prior=blocks_around(survival))
        self._policy: DraftPolicy | None = None
        if config.mode == "auto":
            config = SchedulerConfig(mode="early_stop" if table.is_smooth else "lagged_budget")
            self._policy = DraftPolicy(self._prices, history, num_rows=concurrency, slot_counts=slot_counts(gamma))
        self._scheduler = PrefixScheduler(
            config,
            calibration=neutral,
            history=history,
            acceptance=AcceptanceCorrection(gamma, is_on=False),
            expected_survival=survival,
        )
        self._max_verify_len = config.max_verify_len(gamma)
        self._rows = np.arange(concurrency, dtype=np.int64)
        self._context_tokens = context_tokens
        self._num_pending = np.ones(concurrency, dtype=np.int64)
        self._choice = DraftChoice.nobody(concurrency)

    def step(self, confidence: np.ndarray) -> tuple[np.ndarray, float]:
        """verify_len [R], and the milliseconds of the step. confidence [R, G]."""
        count = len(self._rows)
        self._scheduler.advance()
        if self._policy is not None:
            self._policy.realised.advance()
        choice = self._choice = self._choose()
        verify_lens = np.zeros(count, dtype=np.int64)
        drafting = np.flatnonzero(choice.is_drafting)
        drafted_ms = 0.0
        if len(drafting) and choice.num_slots:
            ingested = int(self._num_pending[drafting].sum())
            drafted_ms = self._prices.draft(
                len(drafting), choice.num_slots, self._context_tokens, ingested
            ) + self._prices.drafting_host(len(drafting))
            last = choice.num_slots * len(drafting)
            offer = Offer(
                rows=self._rows[drafting],
                generations=self._rows[drafting],
                caps=np.full(len(drafting), choice.num_slots, dtype=np.int64),
                is_forced=choice.is_explored[drafting],
                num_requests=count,
                step_ms=self._prices.plain(count, self._context_tokens, 0, last) + drafted_ms,
                is_greedy=np.ones(len(drafting), dtype=np.bool_),
            )
            drafted = confidence[drafting, : choice.num_slots]
            verify_lens[drafting] = self._scheduler.choose(drafted, offer, self._choice.num_planned)
            self._scheduler.record(survival_of(drafted), offer)
        num_drafts = int(verify_lens.sum())
        plain = self._prices.plain(count, self._context_tokens, num_drafts, num_drafts)
        return verify_lens, float(plain[0]) + drafted_ms

    def learn(self, num_tokens: float, step_ms: float) -> None:
        """What the step brought."""
        if self._policy is not None and self._choice.tokens_per_ms:
            expected = self._choice.tokens_per_ms * step_ms
            self._policy.realised.observe(len(self._rows), seen=num_tokens, expected=expected)

    def _choose(self) -> DraftChoice:
        count = len(self._rows)
        if self._policy is None:
            everybody = np.full(count, self._max_verify_len > 0)
            nobody = np.zeros(count, dtype=np.bool_)
            return DraftChoice(self._max_verify_len, everybody, nobody, nobody)
        return self._policy.choose(
            Decoding(
                rows=self._rows,
                generations=self._rows,
                caps=np.full(count, self._gamma, dtype=np.int64),
                num_pending=self._num_pending,
                context_tokens=self._context_tokens,
            )
        )


def compare(found: Sequence[Prediction], measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Predicted against measured tokens/s, where both are there; of mixed prompts."""
    known = {(each["mode"], each["concurrency"]): each for each in measured if each["kind"] == "mixed"}
    errors = []
    for each in found:
        other = known.get((each.mode, each.concurrency))
        if other is not None:
            rate = float(other["tokens_per_s"]["median"])
            errors.append(
                {
                    "mode": each.mode,
                    "concurrency": each.concurrency,
                    "measured": rate,
                    "predicted": each.tokens_per_s,
                    "error": each.tokens_per_s / rate - 1,
                }
            )
    return errors
