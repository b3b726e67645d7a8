"""The engines and the lengths of their caches: every call reserves, is timed, and fails for its requests alone.

What is timed: `draft_ms` ends when the drafts are known to the host, `verify_ms` when the logits are. Where a StepEngine
does both in one call, `draft_ms` holds the call, the draft and its selection, and `verify_ms` what the verification takes
from there on; an engine that computes everything before it returns leaves nothing to `verify_ms`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.protocol import DraftBatch, DraftEngine, SelectBatch, StepEngine, TargetEngine, TargetOutput
from dspark_trt.errors import CapacityError
from dspark_trt.runtime.acceptance import Acceptance, pending_taps
from dspark_trt.runtime.arrays import wait_for
from dspark_trt.runtime.drafting import DraftBlock, PendingTaps, draft_batch, draft_block, ingest_batch
from dspark_trt.runtime.kv import CacheLengths
from dspark_trt.runtime.metrics import StepRecord
from dspark_trt.runtime.slots import RowMove
from dspark_trt.runtime.state import RequestState
from dspark_trt.runtime.verification import Segment, StepPlan, check_selection, num_selected, pack

logger = logging.getLogger(__name__)


class EngineCallFailed(Exception):
    """An engine call raised. The K/V of its requests are undefined: the requests cannot go on."""

    def __init__(self, states: Sequence[RequestState]) -> None:
        super().__init__(f"an engine call failed for {len(states)} requests")
        self.states = states


class EngineCalls:
    """Owns both caches' lengths. `drafter` is None where nothing is drafted, `step_engine` where the host selects."""

    def __init__(
        self, target: TargetEngine, drafter: DraftEngine | None, step_engine: StepEngine | None = None
    ) -> None:
        """Raises CapacityError when the engines' limits do not fit each other."""
        limits = target.limits
        if limits.max_batch_tokens < limits.max_slots:
            raise CapacityError(
                f"engine limits: max_batch_tokens = {limits.max_batch_tokens} is below max_slots = {limits.max_slots}, "
                "so a full batch could not decode; build with more batch tokens or fewer slots"
            )
        if drafter is not None and drafter.limits != limits:
            raise CapacityError(
                f"engine limits: the drafter has {drafter.limits}, the target {limits}; build both with the same limits"
            )
        self.target = target
        self.drafter = drafter
        self.step_engine = step_engine
        self.target_cache = CacheLengths(num_rows=limits.max_slots, capacity=limits.max_seq_len)
        self.context_cache = CacheLengths(num_rows=limits.max_slots, capacity=limits.max_seq_len)
        self.record = StepRecord()  # of the step that is running
        self._pending: PendingTaps | None = None

    def keep_taps(self, segments: Sequence[Segment], results: Sequence[Acceptance], output: TargetOutput) -> None:
        """Copy the taps of what this step committed; the next step ingests them."""
        if self.drafter is not None:
            self._pending = pending_taps(segments, results, output.taps)

    def ingest(self) -> None:
        """Bring the drafter's context up to date with what the last step committed."""
        pending, self._pending = self._pending, None
        if pending is None or self.drafter is None or not (pending := pending.without_finished()).states:
            return
        batch = ingest_batch(pending, self.context_cache)
        for state, num_positions in zip(pending.states, pending.num_positions, strict=True):
            self.context_cache.reserve(state.row, num_positions)
        with self._call("ingest_ms", pending.states):
            self.drafter.ingest(batch)
        for state, num_positions in zip(pending.states, pending.num_positions, strict=True):
            self.context_cache.commit(state.row, num_positions)

    def draft(self, states: Sequence[RequestState]) -> DraftBlock | None:
        """One draft block for each request, whose context holds everything up to the anchor; None without requests."""
        if not states:
            return None
        assert self.drafter is not None, "caps are 0 without a drafter"
        batch = self._draft_batch(states)
        with self._call("draft_ms", states):
            output = self.drafter.draft(batch)
            block = draft_block(batch, output.draft_logits, output.draft_ids, output.confidence_logits)
        self._record_draft(states, block)
        return block

    def verify(
        self, plan: StepPlan, verify_lens: NDArray[np.int64], block: DraftBlock | None
    ) -> tuple[list[Segment], TargetOutput]:
        """One forward pass of the target. Its reservations stand until `commit`. verify_lens [R]."""
        batch, segments = pack(plan, verify_lens, block, self.target_cache)
        self._reserve(plan, verify_lens)
        self._record_batch(plan, int(verify_lens.sum()))
        with self._call("verify_ms", plan.states):
            output = self.target.forward(batch)
            wait_for(output.logits)
        self._record_verification(plan)
        return segments, output

    def draft_and_verify(self, plan: StepPlan, select: SelectBatch) -> tuple[DraftBlock, list[Segment], TargetOutput]:
        """`draft`, the selection of drafts, and `verify` in one call, which waits for nothing but the host's own needs.

        The reservations are what may be verified at most. While the target verifies, the host learns what was drafted.
        """
        assert self.step_engine is not None, "the caller asks for a fused step only where there is one"
        batch = self._draft_batch(plan.drafting)
        plain, _ = pack(plan, np.zeros_like(plan.caps), None, self.target_cache)
        self._reserve(plan, plan.caps)
        self._record_batch(plan, num_selected(select))
        with self._call("draft_ms", plan.states):
            output = self.step_engine.draft_and_verify(batch, select, plain)
            drafts = output.wait()
            check_selection(select, drafts.verify_lens)
            block = draft_block(batch, output.draft_logits, drafts.draft_ids, drafts.confidence_logits)
        self._record_draft(plan.drafting, block)
        _, segments = pack(plan, drafts.verify_lens, block, self.target_cache)
        with self._call("verify_ms", plan.states):
            wait_for(output.target.logits)
        self._record_verification(plan)
        return block, segments, output.target

    def commit(self, segments: Sequence[Segment], results: Sequence[Acceptance]) -> None:
        """Make valid what was accepted: prompt tokens, or the anchor and the accepted drafts."""
        for segment, result in zip(segments, results, strict=True):
            state, num_positions = segment.state, result.num_committed(segment)
            self.target_cache.commit(state.row, num_positions)
            if segment.is_prefill:
                state.commit_prompt(num_positions)

    def move_row(self, move: RowMove[RequestState]) -> None:
        """Copy the live positions of both caches to another row. The lengths follow even if the copy fails."""
        source, destination = move.source, move.destination
        lengths = [int(cache.committed[source]) for cache in (self.target_cache, self.context_cache)]
        self.target_cache.move(source, destination)
        self.context_cache.move(source, destination)
        with self._call(None, [move.occupant]):
            for engine, num_positions in zip((self.target, self.drafter), lengths, strict=True):
                if engine is not None and num_positions:
                    engine.move_row(source, destination, num_positions)

    def clear_row(self, row: int) -> None:
        self.target_cache.clear(row)
        self.context_cache.clear(row)

    def check_integrity(self, occupants: Sequence[RequestState]) -> None:
        """Between two steps; `occupants[row]` lives in that row."""
        for cache in (self.target_cache, self.context_cache):
            cache.check_integrity(len(occupants))
        for state in occupants:
            num_positions = int(self.target_cache.committed[state.row])
            num_tokens = state.num_prefilled + max(state.num_generated - 1, 0)
            assert num_positions == num_tokens, (
                f"{state.request.request_id}: {num_positions} positions, {num_tokens} tokens"
            )

    def _draft_batch(self, states: Sequence[RequestState]) -> DraftBatch:
        assert self.drafter is not None, "caps are 0 without a drafter"
        rows = [state.row for state in states]
        assert (self.context_cache.committed[rows] == self.target_cache.committed[rows]).all(), "context lags behind"
        return draft_batch(states, self.context_cache, self.drafter.gamma)

    def _reserve(self, plan: StepPlan, verify_lens: NDArray[np.int64]) -> None:
        for state, verify_len in zip(plan.decode, verify_lens.tolist(), strict=True):
            self.target_cache.reserve(state.row, 1 + verify_len)
        for chunk in plan.prefill:
            self.target_cache.reserve(chunk.state.row, chunk.num_tokens)

    def _record_batch(self, plan: StepPlan, num_drafts: int) -> None:
        record = self.record
        record.num_requests, record.num_prefill_tokens = len(plan.decode), plan.num_prefill_tokens
        record.num_drafts_verified = num_drafts
        record.batch_tokens = record.num_prefill_tokens + record.num_requests + num_drafts

    def _record_draft(self, states: Sequence[RequestState], block: DraftBlock) -> None:
        self.record.num_drafts_proposed = block.draft_ids.size
        for state in states:
            state.statistics.draft_ms += self.record.draft_ms

    def _record_verification(self, plan: StepPlan) -> None:
        for state in plan.states:
            state.statistics.verify_ms += self.record.verify_ms

    @contextmanager
    def _call(
        self, timed_as: Literal["ingest_ms", "draft_ms", "verify_ms"] | None, states: Sequence[RequestState]
    ) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except Exception as error:  # whatever a backend raises: it is logged in full, the client hears none of it
            logger.exception("an engine call failed; its %d requests end with an error", len(states))
            raise EngineCallFailed(states) from error
        finally:
            if timed_as:
                elapsed_ms = (time.perf_counter() - started) * 1e3
                setattr(self.record, timed_as, getattr(self.record, timed_as) + elapsed_ms)
