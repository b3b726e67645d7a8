"""The decoding loop: continuous batching of speculative decoding, one `step()` after the other.

One thread owns a loop: `submit`, `cancel` and `step` are called from it and from no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dspark_trt.contract.acceptance import AcceptEngine
from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.lookup import LookupAcceptance
from dspark_trt.contract.protocol import DraftEngine, PageLimits, StepEngine, TargetEngine
from dspark_trt.contract.scheduler import DEFAULT_MAX_STRETCH, SchedulerConfig
from dspark_trt.runtime.acceptance import Acceptance, accept
from dspark_trt.runtime.drafting import DraftBlock, with_lookups
from dspark_trt.runtime.emission import Emission, emit_end, emit_result
from dspark_trt.runtime.engine_calls import EngineCalls
from dspark_trt.runtime.fused_acceptance import results_of
from dspark_trt.runtime.metrics import LoopTotals, StepRecord
from dspark_trt.runtime.opening import open_scheduling
from dspark_trt.runtime.page_room import PageRoom
from dspark_trt.runtime.planner import Planner
from dspark_trt.runtime.prefix_cache import PrefixCache
from dspark_trt.runtime.prefix_pages import PrefixPages
from dspark_trt.runtime.request import GenerationRequest
from dspark_trt.runtime.request_queue import RequestQueue
from dspark_trt.runtime.rows import Rows
from dspark_trt.runtime.state import Phase, RequestState, share_keys
from dspark_trt.runtime.step_plan import StepPlan
from dspark_trt.runtime.text_stream import Decode
from dspark_trt.runtime.timed_calls import EngineCallFailed
from dspark_trt.runtime.verification import Segment, harvest
from dspark_trt.steptable.table import StepTable

OnVerified = Callable[[Sequence[Segment], Any, DraftBlock | None], None]
ENGINE_FAILED = "the engine failed while it worked on this request; send the request again"


class DecodingLoop:
    """Decodes requests with one target and, where there is one, one drafter.

    Every step reads prompts, drafts, verifies and hands out tokens for all requests together; requests join and leave
    between steps. A failed request ends with finish_reason "error" and never stops the loop; a failed engine call ends
    the requests it worked on.
    """

    def __init__(
        self,
        *,
        target: TargetEngine,
        drafter: DraftEngine | None,
        step_engine: StepEngine | None = None,
        acceptance: AcceptEngine | None = None,
        step_table: StepTable | None,
        calibration: Calibration,
        lookup: LookupAcceptance | None = None,
        keeps_trajectories: bool = False,
        eos_token_ids: Sequence[int],
        decode: Decode,
        scheduler: SchedulerConfig,
        pages: PageLimits | None = None,
        max_stretch: float = DEFAULT_MAX_STRETCH,
        prefix_cache: bool = False,
        on_verified: OnVerified | None = None,
    ) -> None:
        """`step_table` may be None where the mode prices no steps.

        Without a drafter, or in a mode that verifies no drafts, this is plain decoding. `lookup`: drafts may be copied
        from a request's own text, at most as many as `calibration` has slots; in mode auto beside the drafter, in every
        mode without one. keeps_trajectories: and be taken from what the target predicted behind drafts that it rejected
        (lookahead). `step_engine`, over these very engines, drafts and verifies in one call, in mode lagged_budget.
        `acceptance`: accepts where the logits are; None: the runtime does it, slot by slot.
        pages: of engines whose rows share pages; None: every row has room for max_seq_len. Where pages run out, a new
        request waits, and of those that run the youngest is read again later.
        max_stretch: a step that reads prompts beside requests that decode takes at most so many times a plain one.
        prefix_cache: prompts begin where K/V of their first tokens are there already. The engines are then this loop's
        alone: what another one writes into a row that is free here is not noticed.
        on_verified: called with every step's segments, logits and block before anything is accepted; it only looks.

        Raises RecipeError and CapacityError when the parts do not fit each other.
        """
        self.totals = LoopTotals()
        self.last_step = StepRecord()
        self._on_verified = on_verified
        self._rows: Rows[RequestState] = Rows(target.limits.max_requests)
        self._scheduling = open_scheduling(
            scheduler,
            drafter=drafter,
            lookup=lookup,
            calibration=calibration,
            table=step_table,
            num_rows=target.limits.max_requests,
            selects_on_device=step_engine is not None,
        )
        is_selected_on_device = self._scheduling is not None and self._scheduling.config.mode == "lagged_budget"
        self._engines = EngineCalls(
            target,
            drafter if self._scheduling is not None else None,
            step_engine if is_selected_on_device else None,
            acceptance,
            pages=pages,
            keeps_taps=prefix_cache and pages is None,
        )
        self._planner = Planner(self._engines, self._scheduling, step_table, max_stretch=max_stretch)
        self._prefix_cache: PrefixCache | PrefixPages | None = None
        self._room: PageRoom | None = None
        if (tables := self._engines.tables) is not None:
            # who shares pages has to share the context of their positions with them
            is_sharing = prefix_cache and (self._engines.drafter is None or tables.limits.holds_context)
            prefix_pages = PrefixPages(self._engines, tables, self._rows, self.totals) if is_sharing else None
            self._room = PageRoom(self._engines, tables, self._rows, prefix_pages)
            self._prefix_cache = prefix_pages
        elif prefix_cache:
            self._prefix_cache = PrefixCache(self._engines, self._rows, self.totals)
        self._queue = RequestQueue(
            target,
            eos_token_ids=eos_token_ids,
            decode=decode,
            looks_up=self._scheduling is not None and self._scheduling.looks_up,
            keeps_trajectories=keeps_trajectories,
        )
        self._plan: StepPlan | None = None  # of the step that is running
        self._emissions: list[Emission] = []

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._queue.num_unfinished > 0

    @property
    def request_ids(self) -> list[str]:
        """Of all that wait or run."""
        return self._queue.request_ids

    @property
    def num_running(self) -> int:
        """Requests that have a KV row."""
        return len(self._rows.occupants)

    @property
    def num_queued(self) -> int:
        return self._queue.num_waiting

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; it gets a KV row when one is free, first come first served.

        Raises RequestError when the request is not acceptable; nothing is queued then.
        """
        self._queue.submit(request)

    def cancel(self, request_id: str) -> bool:
        """End a request at the beginning of the next step. False when no request of this id waits or runs."""
        return self._queue.cancel(request_id)

    def step(self) -> list[Emission]:
        """One iteration over the batch."""
        started = time.perf_counter()
        self.last_step = self._engines.record = StepRecord()
        self._emissions = []
        self._plan = None
        self._drop_cancelled()
        if self._prefix_cache is not None:
            self._prefix_cache.resume()
        if self._room is not None:
            self._preempt(self._room)
        self._admit()
        if self._rows.occupants:
            try:
                self._step()
            except EngineCallFailed as failure:
                self._fail(failure)
            self._vacate()
            self.totals.add_step(self.last_step)
        self.last_step.total_ms = (time.perf_counter() - started) * 1e3
        if self._scheduling is not None and self._plan is not None:
            self._scheduling.price(self._plan, self.last_step)
        return self._emissions

    def _step(self) -> None:
        """draft -> schedule -> verify -> accept -> emit."""
        plan = self._plan = self._planner.make_plan(self._rows.occupants)
        block: DraftBlock | None
        if self._engines.step_engine and plan.num_drafting:
            assert self._scheduling is not None, "what drafts is scheduled"
            block, segments, output, decided = self._engines.draft_and_verify(plan, self._scheduling.select(plan))
            self._scheduling.record_selected(plan, block)
        else:
            block = with_lookups(self._engines.draft(plan.drafting, plan.num_slots), plan.lookups)
            segments, output, decided = self._engines.verify(plan, self._planner.verify_lens(plan, block), block)
        if self._on_verified is not None:
            self._on_verified(segments, output.logits, block)
        results = accept(segments, output.logits, block) if decided is None else results_of(segments, decided)
        self._engines.commit(segments, results)
        if self._scheduling is not None:
            self._scheduling.learn(plan, segments, results)
        self._emit(segments, results)
        harvest(segments, [result.num_accepted_drafts for result in results], output.logits)
        self._engines.keep_taps(segments, results, output)

    def check_integrity(self) -> None:
        """Assert what holds between two steps: rows, lengths and requests agree."""
        self._rows.check_integrity()
        self._engines.check_integrity(self._rows.occupants)
        if self._prefix_cache is not None:
            self._prefix_cache.check_integrity()
        assert self._queue.num_unfinished == self.num_running + self.num_queued, "a request neither runs nor waits"

    def _drop_cancelled(self) -> None:
        for state in self._queue.take_cancelled():
            self._end(state, emit_end(state, "cancelled"))
        self._vacate()

    def _admit(self) -> None:
        """Give the free rows to the requests that wait longest."""
        while self._queue.num_waiting and self._rows.num_free:
            if self._room is not None and not self._room.is_enough_for(self._queue.next):
                break
            state = self._queue.take_next()
            share_keys(state, self._rows.occupants)
            self._rows.occupy(state)
            if self._room is not None:
                self._room.admit(state)
            elif isinstance(self._prefix_cache, PrefixCache):
                self._prefix_cache.admit(state)

    def _preempt(self, room: PageRoom) -> None:
        """Requests whose pages an older one needs wait in front of all others, and are read again."""
        while (state := room.make()) is not None:
            self._leave_row(state)
            state.preempt()
            self._queue.put_back(state)
            self.totals.num_preempted += 1

    def _emit(self, segments: Sequence[Segment], results: Sequence[Acceptance]) -> None:
        """Hand out tokens and text; end the requests that are complete or failed."""
        for segment, result in zip(segments, results, strict=True):
            emission = emit_result(segment, result)
            if emission is None:
                continue
            self.last_step.add_emitted(len(emission.token_ids), result.num_accepted_drafts)
            if emission.finish_reason:
                self._end(segment.state, emission)
            else:
                self._emissions.append(emission)

    def _end(self, state: RequestState, emission: Emission) -> None:
        """Hand out the last emission of a request. Its row is freed by `_vacate`."""
        assert emission.finish_reason is not None, "the last emission says why"
        state.finish(has_failed=emission.finish_reason == "error")
        self._queue.forget(state)
        self._emissions.append(emission)
        self.totals.num_finished[emission.finish_reason] += 1

    def _fail(self, failure: EngineCallFailed) -> None:
        """End the requests of a call that failed. What free rows hold is not trusted any more either."""
        for state in failure.states:
            self._end(state, emit_end(state, "error", ENGINE_FAILED))
        if self._prefix_cache is not None:
            self._prefix_cache.forget()

    def _vacate(self) -> None:
        """Free the rows of finished requests, the highest first: then no finished row is ever moved."""
        while finished := [state for state in self._rows.occupants if state.phase is Phase.FINISHED]:
            self._leave_row(finished[-1])

    def _leave_row(self, state: RequestState) -> None:
        """Free a row; the last occupied one moves into its place."""
        if self._prefix_cache is not None:
            self._prefix_cache.retain(state)
        self._engines.release(state)
        move = self._rows.release(state)
        if move is None:
            return
        try:
            self._engines.move_row(move)
            if self._scheduling is not None:
                self._scheduling.move_row(move.source, move.destination)
            self.totals.num_rows_moved += 1
        except EngineCallFailed as failure:
            self._fail(failure)
