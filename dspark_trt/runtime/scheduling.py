"""Everything that decides in a step: who drafts, what is verified, and what serving teaches about both.

Shape letters: `R` requests that decode, `G` gamma.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.drafter_form import slot_counts
from dspark_trt.contract.scheduler import SchedulerConfig, SchedulerMode
from dspark_trt.errors import RecipeError
from dspark_trt.runtime.acceptance import Acceptance
from dspark_trt.runtime.corrections import AcceptanceCorrection, TimeCorrection
from dspark_trt.runtime.draft_policy import Decoding, DraftChoice, DraftPolicy
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.metrics import StepRecord
from dspark_trt.runtime.prefix_scheduler import PrefixScheduler, survival_of
from dspark_trt.runtime.prices import StepPrices
from dspark_trt.runtime.step_plan import StepPlan
from dspark_trt.runtime.survival_history import SurvivalHistory
from dspark_trt.runtime.verification import Segment, offer_drafts
from dspark_trt.steptable.table import StepTable

logger = logging.getLogger(__name__)


class Scheduling:
    """The policy, the prefix scheduler and their corrections, for one loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        calibration: Calibration,
        table: StepTable | None,
        num_rows: int,
        selects_on_device: bool,
    ) -> None:
        """Raises RecipeError when a mode lacks its step table, or verifies more than the drafter proposes."""
        if config.is_adaptive and table is None:
            raise RecipeError(f"scheduler {config.mode!r}: expected a step table, found none; use mode 'fixed'")
        gamma = calibration.gamma
        self.config = config
        if config.mode == "auto":
            assert table is not None, "auto is adaptive"
            self.config = SchedulerConfig(mode=_mode_for(table, selects_on_device), corrects=config.corrects)
        self.times = TimeCorrection(is_on=config.corrects)
        self.acceptance = AcceptanceCorrection(gamma, is_on=config.corrects)
        self.prices = None if table is None else StepPrices(table, self.times)
        history = SurvivalHistory(num_rows=num_rows, gamma=gamma, prior=calibration.expected_survival)
        self._policy = None
        if config.mode == "auto" and self.prices is not None:
            counts = (gamma,) if selects_on_device else slot_counts(gamma)
            self._policy = DraftPolicy(
                self.prices,
                history,
                num_rows=num_rows,
                slot_counts=counts,
                stops_early=self.config.mode == "early_stop",
            )
        self.prefixes = PrefixScheduler(
            self.config,
            calibration=calibration,
            history=history,
            acceptance=self.acceptance,
            expected_survival=calibration.expected_survival,
        )
        self._max_verify_len = self.config.max_verify_len(gamma)
        self._confidence: NDArray[np.float64] | None = None
        self._choice: DraftChoice | None = None

    def begin_step(self) -> None:
        """What was seen two steps ago counts from now on."""
        self.times.advance()
        self.acceptance.advance()
        self.prefixes.advance()
        if self._policy is not None:
            self._policy.realised.advance()
        self._confidence = None
        self._choice = None

    def who_drafts(self, decoding: Decoding) -> DraftChoice:
        """Fixed before anything is drafted."""
        if self._policy is not None:
            self._choice = self._policy.choose(decoding)
            return self._choice
        everybody = np.ones(len(decoding.rows), dtype=np.bool_)
        return DraftChoice(self._max_verify_len, everybody, ~everybody)

    def verify_lens(self, plan: StepPlan, block: DraftBlock | None) -> NDArray[np.int64]:
        """verify_len of every request that decodes, [R]."""
        verify_lens = np.zeros(len(plan.decode), dtype=np.int64)
        if block is not None:
            offer = offer_drafts(plan, self.prices, block.num_usable)
            self._confidence = self.prefixes.confidence(block, offer.is_greedy)
            verify_lens[: plan.num_drafting] = self.prefixes.choose(self._confidence, offer)
        return verify_lens

    def record_selected(self, plan: StepPlan, block: DraftBlock) -> None:
        """A device chose among the drafts of `block`: its confidences count from the step after the next one on."""
        offer = offer_drafts(plan, self.prices)
        self._confidence = self.prefixes.confidence(block, offer.is_greedy)
        self.prefixes.record(survival_of(self._confidence), offer)

    def learn(self, plan: StepPlan, segments: Sequence[Segment], results: Sequence[Acceptance]) -> None:
        """What became of this step's drafts; seen by decisions two steps later."""
        if self._confidence is None or not plan.num_drafting:
            return
        drafting = segments[: plan.num_drafting]
        outcomes = results[: plan.num_drafting]
        offer = offer_drafts(plan, None)
        self.acceptance.observe(
            self._confidence,
            np.array([len(segment.draft_ids) for segment in drafting], dtype=np.int64),
            np.array([result.num_accepted_drafts for result in outcomes], dtype=np.int64),
            offer.is_greedy,
        )

    def price(self, plan: StepPlan, record: StepRecord) -> None:
        """Write what this step was expected to take into its record, and learn from what it took."""
        if self.prices is None:
            return
        num_drafts, drafting = record.num_drafts_verified, plan.num_drafting
        verify = plan.verify_ms(self.prices, num_drafts)
        draft = plan.draft_ms(self.prices, record.num_ingested_tokens)
        host = self.prices.host(plan.num_segments)
        record.expected_ms = verify + draft + host + self.prices.drafting_host(drafting)
        if self._policy is not None and self._choice is not None and self._choice.tokens_per_ms and not plan.prefill:
            expected = self._choice.tokens_per_ms * record.expected_ms
            self._policy.realised.observe(len(plan.decode), seen=record.num_tokens_emitted, expected=expected)
        self.times.observe("verify", plan.num_segments, expected_ms=verify, seen_ms=record.verify_ms)
        if drafting:
            seen = record.draft_ms + record.ingest_ms
            self.times.observe("draft", drafting, expected_ms=draft, seen_ms=seen)
            extra = self.prices.drafting_host(drafting)
            self.times.observe("drafting_host", drafting, expected_ms=extra, seen_ms=record.outside_ms - host)
        else:
            self.times.observe("host", plan.num_segments, expected_ms=host, seen_ms=record.outside_ms)

    def move_row(self, source: int, destination: int) -> None:
        """A request moved to another KV row: what is known of it follows."""
        self.prefixes.move_row(source, destination)
        if self._policy is not None:
            self._policy.move_row(source, destination)


def _mode_for(table: StepTable, selects_on_device: bool) -> SchedulerMode:
    """`early_stop` where every token has its price, `lagged_budget` on stairs and where a device selects."""
    mode: SchedulerMode = "early_stop" if table.is_smooth and not selects_on_device else "lagged_budget"
    why = (
        "the device selects drafts itself"
        if selects_on_device
        else f"the step table {'rises with every token' if table.is_smooth else 'is a stair'}"
    )
    logger.info("scheduler auto: %s, since %s; not drafting is one of its choices", mode, why)
    return mode
