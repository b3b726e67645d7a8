"""Everything that decides in a step: who drafts, what is verified, and what serving teaches about both.

Shape letters: `R` requests that decode, `G` gamma.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.drafter_form import slot_counts
from dspark_trt.contract.lookup import LookupAcceptance
from dspark_trt.contract.protocol import SelectBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.errors import RecipeError
from dspark_trt.runtime.acceptance import Acceptance
from dspark_trt.runtime.corrections import AcceptanceCorrection, Part, TimeCorrection
from dspark_trt.runtime.draft_choice import Decoding, DraftChoice
from dspark_trt.runtime.draft_policy import DraftPolicy
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.lookup import Lookup
from dspark_trt.runtime.lookup_survival import LookupOffer, LookupSurvival
from dspark_trt.runtime.metrics import StepRecord
from dspark_trt.runtime.prefix_scheduler import PrefixScheduler, mode_for, survival_of
from dspark_trt.runtime.prices import StepPrices
from dspark_trt.runtime.sampling import is_greedy
from dspark_trt.runtime.step_plan import StepPlan
from dspark_trt.runtime.survival_history import SurvivalHistory
from dspark_trt.runtime.verification import Segment, offer_drafts, select_batch
from dspark_trt.steptable.table import StepTable

LEAST_SEEN_SHARE = 0.1  # of a price of time outside the engines: a difference of two times may come out as nothing
MAX_LOOKUP_REQUESTS = 4  # more requests that decode look nothing up in mode auto


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
        lookup: LookupAcceptance | None = None,
        has_drafter: bool = True,
    ) -> None:
        """`lookup`: drafts may be copied from a request's own text, in mode auto and where there is no drafter.

        Raises RecipeError when a mode lacks its step table, or verifies more than the drafter proposes.
        """
        if config.is_adaptive and table is None:
            raise RecipeError(f"scheduler {config.mode!r}: expected a step table, found none; use mode 'fixed'")
        gamma = calibration.gamma
        self.config = config
        if config.mode == "auto":
            assert table is not None, "auto is adaptive"
            self.config = SchedulerConfig(mode=mode_for(table, selects_on_device), corrects=config.corrects)
        self.times = TimeCorrection(is_on=config.corrects)
        self.acceptance = AcceptanceCorrection(gamma, is_on=config.corrects)
        self.prices = None if table is None else StepPrices(table, self.times)
        history = SurvivalHistory(num_rows=num_rows, gamma=gamma, prior=calibration.expected_blocks)
        self._has_drafter = has_drafter
        self._is_auto = config.mode == "auto"
        self._lookup_survival: LookupSurvival | None = None
        if lookup is not None and not selects_on_device and (config.mode == "auto" or not has_drafter):
            self._lookup_survival = LookupSurvival(lookup, num_rows=num_rows, gamma=gamma, corrects=config.corrects)
        self._policy = None
        if config.mode == "auto" and has_drafter and self.prices is not None:
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
        self.max_verify_len = self.config.max_verify_len(gamma)
        self._confidence: NDArray[np.float64] | None = None
        self._found_offer: LookupOffer | None = None  # what this step's lookups found
        self._found_confidence = self._lookup_confidence = np.empty((0, gamma))
        self._found: dict[int, int] = {}  # its line there, by generation
        self._lookups: LookupOffer | None = None  # of these, what was taken
        self._choice: DraftChoice | None = None

    @property
    def looks_up(self) -> bool:
        """Whether drafts may be copied from a request's own text."""
        return self._lookup_survival is not None

    def looks_up_beside(self, num_requests: int) -> bool:
        """Whether a step with so many requests looks up: in mode auto only where copies were seen to pay for the time
        that they take outside the engines (ADR 11)."""
        return self.looks_up and (not self._is_auto or num_requests <= MAX_LOOKUP_REQUESTS)

    def begin_step(self) -> None:
        """What was seen two steps ago counts from now on."""
        self.times.advance()
        self.acceptance.advance()
        self.prefixes.advance()
        if self._lookup_survival is not None:
            self._lookup_survival.advance()
        if self._policy is not None:
            self._policy.realised.advance()
        self._confidence = None
        self._lookups = self._found_offer = None
        self._choice = None

    def who_drafts(
        self, decoding: Decoding, lookups: Sequence[Lookup | None] = (), are_greedy: Sequence[bool] = ()
    ) -> DraftChoice:
        """Fixed before anything is drafted. lookups, are_greedy [R]; empty where nobody looks up."""
        survival = self._survival_of_lookups(decoding, lookups, are_greedy) if any(lookups) else None
        if self._policy is not None:
            self._choice = self._policy.choose(decoding, survival)
            return self._choice
        nobody = np.zeros(len(decoding.rows), dtype=np.bool_)
        if not self._has_drafter:
            is_found = np.array([lookup is not None for lookup in lookups] or nobody, dtype=np.bool_)
            return DraftChoice(0, nobody, nobody, is_found)
        return DraftChoice(self.max_verify_len, ~nobody, nobody, nobody)

    def _survival_of_lookups(
        self, decoding: Decoding, lookups: Sequence[Lookup | None], are_greedy: Sequence[bool]
    ) -> NDArray[np.float64] | None:
        """[R, G], 0 where nothing was found; None: nobody found anything."""
        found = [index for index, lookup in enumerate(lookups) if lookup is not None]
        if self._lookup_survival is None or not found:
            return None
        offer = LookupOffer.of(
            [lookup for lookup in lookups if lookup is not None],
            decoding.rows[found].tolist(),
            decoding.generations[found].tolist(),
            [are_greedy[index] for index in found],
        )
        self._found = {generation: at for at, generation in enumerate(offer.generations.tolist())}
        self._found_offer, self._found_confidence = offer, self._lookup_survival.confidence(offer)
        survival = np.zeros((len(lookups), self.prefixes.gamma))
        survival[found] = survival_of(self._found_confidence)
        return np.where(np.arange(survival.shape[1]) < decoding.caps[:, None], survival, 0.0)

    def verify_lens(self, plan: StepPlan, block: DraftBlock | None) -> NDArray[np.int64]:
        """verify_len of every request that decodes, [R]."""
        verify_lens = np.zeros(len(plan.decode), dtype=np.int64)
        if block is None:
            return verify_lens
        looked_up = self._confidence_of_lookups(plan)
        survival = None if looked_up is None else survival_of(looked_up)
        offer = offer_drafts(plan, self.prices, block.num_usable, survival)
        self._confidence = self.prefixes.confidence(block, offer.is_greedy[: plan.num_drafting])
        confidence = self._confidence
        if looked_up is not None:
            num_slots = block.draft_ids.shape[1]
            confidence = np.zeros((plan.num_drafting, num_slots))
            confidence[:, : block.confidence_logits.shape[1]] = self._confidence
            confidence = np.concatenate((confidence, looked_up[:, :num_slots]))
        num_planned = self._choice.num_planned if self._choice is not None else 0
        verify_lens[: plan.num_offering] = self.prefixes.choose(confidence, offer, num_planned)
        if self.config.is_adaptive and plan.num_drafting:
            self.prefixes.record(survival_of(self._confidence), offer)
        return verify_lens

    def _confidence_of_lookups(self, plan: StepPlan) -> NDArray[np.float64] | None:
        """[R of those that look up, G]; None: nobody does."""
        if self._found_offer is None or not plan.lookups:
            return None
        taken = [self._found[state.generation] for state in plan.offering[plan.num_drafting :]]
        self._lookups = self._found_offer.chosen(taken)
        self._lookup_confidence = self._found_confidence[taken]
        return self._lookup_confidence

    def select(self, plan: StepPlan) -> SelectBatch:
        """For a device that chooses among the drafts itself: how many are verified is known before any is drafted."""
        budget = self.prefixes.budget(offer_drafts(plan, self.prices))
        return select_batch(plan, budget, self.prefixes.temperatures[: plan.num_slots])

    def record_selected(self, plan: StepPlan, block: DraftBlock) -> None:
        """A device chose among the drafts of `block`: its confidences count from the step after the next one on."""
        offer = offer_drafts(plan, self.prices)
        self._confidence = self.prefixes.confidence(block, offer.is_greedy)
        self.prefixes.record(survival_of(self._confidence), offer)

    def learn(self, plan: StepPlan, segments: Sequence[Segment], results: Sequence[Acceptance]) -> None:
        """What became of this step's drafts; seen by decisions two steps later."""
        if not plan.num_offering:
            return
        verified = np.array([len(segment.draft_ids) for segment in segments[: plan.num_offering]], dtype=np.int64)
        accepted = np.array([each.num_accepted_drafts for each in results[: plan.num_offering]], dtype=np.int64)
        drafting = slice(plan.num_drafting)
        if self._confidence is not None and plan.num_drafting:
            greedy = [is_greedy(state.params.temperature) for state in plan.drafting]
            self.acceptance.observe(self._confidence, verified[drafting], accepted[drafting], np.array(greedy))
        if self._lookup_survival is not None and self._lookups is not None:
            looking_up = slice(plan.num_drafting, plan.num_offering)
            self._lookup_survival.observe(
                self._lookups, self._lookup_confidence, verified[looking_up], accepted[looking_up]
            )

    def price(self, plan: StepPlan, record: StepRecord) -> None:
        """Write what this step was expected to take into its record, and learn from what it took."""
        if self.prices is None:
            return
        drafting = plan.num_drafting
        verify = plan.verify_ms(self.prices, record.num_drafts_verified)
        draft = plan.draft_ms(self.prices, record.num_ingested_tokens)
        host = self.prices.host(plan.num_segments)
        copying = self.prices.lookup_host(plan.num_segments) if plan.lookups and not drafting else 0.0
        record.expected_ms = verify + draft + host + self.prices.drafting_host(drafting) + copying
        if self._policy is not None and self._choice is not None and self._choice.tokens_per_ms and not plan.prefill:
            expected = self._choice.tokens_per_ms * record.expected_ms
            self._policy.realised.observe(len(plan.decode), seen=record.num_tokens_emitted, expected=expected)
        part: Part = "verify_drafts" if record.num_drafts_verified else "verify"
        self.times.observe(part, plan.num_segments, expected_ms=verify, seen_ms=record.verify_ms)
        if drafting:
            seen = record.draft_ms + record.ingest_ms
            self.times.observe("draft", drafting, expected_ms=draft, seen_ms=seen)
            extra = self.prices.drafting_host(drafting)
            self.times.observe("drafting_host", drafting, expected_ms=extra, seen_ms=record.outside_ms - host)
        elif copying:
            seen = max(record.outside_ms - host, LEAST_SEEN_SHARE * copying)
            self.times.observe("lookup_host", plan.num_segments, expected_ms=copying, seen_ms=seen)
        else:
            self.times.observe("host", plan.num_segments, expected_ms=host, seen_ms=record.outside_ms)

    def move_row(self, source: int, destination: int) -> None:
        """A request moved to another KV row: what is known of it follows."""
        self.prefixes.move_row(source, destination)
        if self._policy is not None:
            self._policy.move_row(source, destination)
        if self._lookup_survival is not None:
            self._lookup_survival.move_row(source, destination)
