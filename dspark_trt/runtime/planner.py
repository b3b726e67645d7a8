"""Makes the plan of a step: gathers what the past tells of the requests that run, and shares the token budget.

Shape letters: `R` requests that decode.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.runtime.corrections import TimeCorrection
from dspark_trt.runtime.draft_choice import Decoding, DraftChoice
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.engine_calls import EngineCalls
from dspark_trt.runtime.lookup import Lookup
from dspark_trt.runtime.prices import StepPrices
from dspark_trt.runtime.sampling import is_greedy
from dspark_trt.runtime.scheduling import Scheduling
from dspark_trt.runtime.state import Phase, RequestState
from dspark_trt.runtime.step_plan import StepPlan, draft_cap, max_prefill_tokens, plan_step
from dspark_trt.steptable.table import StepTable


class Planner:
    """One plan a step, for one loop."""

    def __init__(
        self,
        engines: EngineCalls,
        scheduling: Scheduling | None,
        step_table: StepTable | None,
        *,
        max_stretch: float,
    ) -> None:
        """scheduling: None: nobody drafts. max_stretch: see `DecodingLoop`."""
        self._engines = engines
        self._scheduling = scheduling
        self._prices = None if step_table is None else StepPrices(step_table, TimeCorrection(is_on=False))
        self._max_verify_len = 0 if scheduling is None else scheduling.max_verify_len
        self._max_stretch = max_stretch

    @property
    def _limits(self) -> EngineLimits:
        return self._engines.target.limits

    def make_plan(self, running: Sequence[RequestState]) -> StepPlan:
        """What this step may do at most, from the past alone; its randomness is drawn. `running[row]` has that row."""
        decode = [state for state in running if state.phase is Phase.DECODE]
        prompts = [state for state in running if state.phase is Phase.PREFILL and not state.awaits_prefix]
        caps = np.array([draft_cap(state, self._max_verify_len) for state in decode], dtype=np.int64)
        context_tokens = int(self._engines.target_cache.committed[: len(running)].sum()) / len(running)
        lookups: list[Lookup | None] = [None] * len(decode)
        if self._scheduling is not None and self._scheduling.looks_up_beside(len(decode)):
            lookups = [
                state.look_up(cap) if cap > 0 else None for state, cap in zip(decode, caps.tolist(), strict=True)
            ]
        prefill_tokens = 0
        if prompts:
            prefill_tokens = max_prefill_tokens(
                self._prices,
                len(decode),
                context_tokens,
                max_batch_tokens=self._limits.max_batch_tokens,
                max_stretch=self._max_stretch,
            )
        choice = DraftChoice.nobody(len(decode))
        if self._scheduling is not None:
            self._scheduling.begin_step()
            rows = np.array([state.row for state in decode], dtype=np.int64)
            decoding = Decoding(
                rows=rows,
                generations=np.array([state.generation for state in decode], dtype=np.int64),
                caps=caps,
                num_pending=self._engines.num_pending(rows),
                context_tokens=context_tokens,
            )
            are_greedy = [is_greedy(state.params.temperature) for state in decode] if any(lookups) else []
            choice = self._scheduling.who_drafts(decoding, lookups, are_greedy)
        plan = plan_step(
            decode,
            prompts,
            choice=choice,
            caps=caps,
            lookups=lookups,
            max_batch_tokens=self._limits.max_batch_tokens,
            max_prefill_tokens=prefill_tokens,
            context_tokens=context_tokens,
        )
        for index, state in enumerate(plan.decode):
            state.draw_words(num_slots=1 + plan.num_proposed(index))
        for chunk in plan.prefill:
            chunk.state.draw_words(num_slots=1)
        return plan

    def verify_lens(self, plan: StepPlan, block: DraftBlock | None) -> NDArray[np.int64]:
        """How many drafts of every request that decodes are verified, [R]."""
        if self._scheduling is None:
            return np.zeros(len(plan.decode), dtype=np.int64)
        return self._scheduling.verify_lens(plan, block)
