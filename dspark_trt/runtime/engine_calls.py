"""The engines and the lengths of their caches: every call reserves, is timed, and fails for its requests alone.

What is timed: `draft_ms` ends when the drafts are known to the host, `verify_ms` when the logits are, or what became of
the drafts where an engine accepts them. Where a StepEngine does both in one call, `draft_ms` holds the call, the draft
and its selection, and `verify_ms` what the verification takes from there on; an engine that computes everything before
it returns leaves nothing to `verify_ms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.acceptance import AcceptEngine
from dspark_trt.contract.protocol import (
    DraftBatch,
    DraftEngine,
    SelectBatch,
    StepEngine,
    TargetEngine,
    TargetOutput,
)
from dspark_trt.errors import CapacityError
from dspark_trt.runtime.acceptance import Acceptance
from dspark_trt.runtime.arrays import wait_for
from dspark_trt.runtime.drafter_context import DrafterContext
from dspark_trt.runtime.drafting import DraftBlock, DraftVocabulary, draft_batch, draft_block
from dspark_trt.runtime.fused_acceptance import Decided, decide
from dspark_trt.runtime.kv import CacheLengths
from dspark_trt.runtime.metrics import StepRecord
from dspark_trt.runtime.pending_taps import TapChunk
from dspark_trt.runtime.rows import RowMove
from dspark_trt.runtime.state import RequestState
from dspark_trt.runtime.step_plan import StepPlan
from dspark_trt.runtime.timed_calls import timed_call
from dspark_trt.runtime.verification import Segment, check_selection, num_selected, pack


class EngineCalls:
    """Owns both caches' lengths. `drafter` is None where nothing is drafted, `step_engine` where the host selects,
    `acceptance` where the runtime accepts slot by slot."""

    def __init__(
        self,
        target: TargetEngine,
        drafter: DraftEngine | None,
        step_engine: StepEngine | None = None,
        acceptance: AcceptEngine | None = None,
        *,
        keeps_taps: bool = False,
    ) -> None:
        """keeps_taps: those of requests that draft no more stay while they have a row: others may need them.

        Raises CapacityError when the engines' limits do not fit each other.
        """
        limits = target.limits
        if limits.max_batch_tokens < limits.max_requests:
            raise CapacityError(
                f"engine limits: max_batch_tokens = {limits.max_batch_tokens} is below max_requests = "
                f"{limits.max_requests}, so a full batch could not decode; build with more "
                "batch tokens or fewer requests"
            )
        if drafter is not None and drafter.limits != limits:
            raise CapacityError(
                f"engine limits: the drafter has {drafter.limits}, the target {limits}; build both with the same limits"
            )
        self.target = target
        self.drafter = drafter
        self.step_engine = step_engine
        self.acceptance = acceptance
        self.target_cache = CacheLengths(num_rows=limits.max_requests, capacity=limits.max_seq_len)
        self.context = DrafterContext(drafter, limits, keeps_taps=keeps_taps)
        self.record = StepRecord()  # of the step that is running
        self._packed_ids = np.empty(0, dtype=np.int64)  # [T] of the step's verification
        vocab = None if drafter is None else drafter.draft_vocab
        self._draft_vocabulary = DraftVocabulary.of(vocab, target.vocab_size)

    def keep_taps(self, segments: Sequence[Segment], results: Sequence[Acceptance], output: TargetOutput) -> None:
        """Copy taps and ids of what this step committed, for the requests that go on drafting."""
        self.context.keep_taps(segments, results, output, self._packed_ids)

    def num_pending(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions that the drafter's context lacks, of the requests in these rows."""
        missing: NDArray[np.int64] = self.target_cache.committed[rows] - self.context.cache.committed[rows]
        return missing

    def draft(self, states: Sequence[RequestState], num_slots: int) -> DraftBlock | None:
        """One draft block for each request, after its context was brought up to the anchor; None without requests.

        Taps of other requests that have waited too long are ingested, too.
        """
        ingest = self.context.all_but_last(states, self.record)
        if not states:
            self.context.ingest(ingest, self.record)
            return None
        assert self.drafter is not None, "caps are 0 without a drafter"
        batch = self._draft_batch(states, num_slots)
        involved = [*states, *(state for state in ingest.states if state not in states)] if ingest else states
        with timed_call(self.record, "draft_ms", involved):
            output = self.drafter.draft(batch, ingest.batch if ingest else None)
            block = self._block(batch, output.draft_logits, output.draft_ids, output.confidence_logits)
        self._record_draft(states, block)
        return block

    def verify(
        self, plan: StepPlan, verify_lens: NDArray[np.int64], block: DraftBlock | None
    ) -> tuple[list[Segment], TargetOutput, Decided | None]:
        """One forward pass of the target, and acceptance where an engine does it. Its reservations stand until
        `commit`. verify_lens [R]."""
        batch, segments = pack(plan, verify_lens, block, self.target_cache)
        self._packed_ids = batch.token_ids
        self._reserve(plan, verify_lens)
        self._record_batch(plan, int(verify_lens.sum()))
        with timed_call(self.record, "verify_ms", plan.states):
            output = self.target.forward(batch)
            decided = self._await(segments, output, block)
        self._record_verification(plan)
        return segments, output, decided

    def draft_and_verify(
        self, plan: StepPlan, select: SelectBatch
    ) -> tuple[DraftBlock, list[Segment], TargetOutput, Decided | None]:
        """`draft`, the selection of drafts, and `verify` in one call, which waits for nothing but the host's own needs.

        The reservations are what may be verified at most. While the target verifies, the host learns what was drafted.
        """
        assert self.step_engine is not None, "the caller asks for a fused step only where there is one"
        self.context.ingest(self.context.all_but_last(plan.drafting, self.record), self.record)
        batch = self._draft_batch(plan.drafting, plan.num_slots)
        plain, _ = pack(plan, np.zeros_like(plan.caps), None, self.target_cache)
        self._reserve(plan, plan.caps)
        self._record_batch(plan, num_selected(select))
        with timed_call(self.record, "draft_ms", plan.states):
            output = self.step_engine.draft_and_verify(batch, select, plain)
            drafts = output.wait()
            check_selection(select, drafts.verify_lens)
            block = self._block(batch, output.draft_logits, drafts.draft_ids, drafts.confidence_logits)
        self._record_draft(plan.drafting, block)
        packed, segments = pack(plan, drafts.verify_lens, block, self.target_cache)
        self._packed_ids = packed.token_ids
        with timed_call(self.record, "verify_ms", plan.states):
            decided = self._await(segments, output.target, block)
        self._record_verification(plan)
        return block, segments, output.target, decided

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
        lengths = [int(cache.committed[source]) for cache in (self.target_cache, self.context.cache)]
        self.target_cache.move(source, destination)
        self.context.cache.move(source, destination)
        self._copy(source, destination, lengths, [move.occupant])

    def copy_row(self, source: int, destination: int, num_positions: int, num_context: int) -> None:
        """Copy the first positions of both caches to a row without a request; the same row: what is behind them goes.

        The lengths stay as they are. Raises EngineCallFailed, for no request: `destination` is then undefined.
        """
        self._copy(source, destination, (num_positions, num_context), [])

    def begin(self, state: RequestState, num_positions: int, num_context: int, taps: Sequence[TapChunk]) -> None:
        """A request's row holds the first positions of its prompt already, of both caches.

        taps: begin with what its context lacks of them.
        """
        self.target_cache.begin(state.row, num_positions)
        state.reuse_prompt(num_positions)
        self.context.begin(state, num_context, taps, num_positions - num_context)

    def release(self, state: RequestState) -> None:
        """A request leaves its row."""
        self.context.release(state)
        self.target_cache.clear(state.row)

    def check_integrity(self, occupants: Sequence[RequestState]) -> None:
        """Between two steps; `occupants[row]` lives in that row."""
        for cache in (self.target_cache, self.context.cache):
            cache.check_integrity(len(occupants))
        for state in occupants:
            if self.drafter is not None and state.needs_taps:
                assert self.context.num_known(state) == self.target_cache.committed[state.row], "taps were lost"
            num_positions = int(self.target_cache.committed[state.row])
            num_tokens = state.num_prefilled + max(state.num_generated - 1, 0)
            assert num_positions == num_tokens, (
                f"{state.request.request_id}: {num_positions} positions, {num_tokens} tokens"
            )

    def _draft_batch(self, states: Sequence[RequestState], num_slots: int) -> DraftBatch:
        rows = [state.row for state in states]
        assert (self.context.cache.committed[rows] == self.target_cache.committed[rows]).all(), "context lags behind"
        return draft_batch(states, self.context.cache, num_slots)

    def _block(self, batch: DraftBatch, draft_logits: Any, draft_ids: Any, confidence_logits: Any) -> DraftBlock:
        vocab_size = self.target.vocab_size
        return draft_block(batch, draft_logits, draft_ids, confidence_logits, self._draft_vocabulary, vocab_size)

    def _await(self, segments: Sequence[Segment], output: TargetOutput, block: DraftBlock | None) -> Decided | None:
        """Wait for the target, and for what became of its drafts where an engine accepts them."""
        decided = decide(self.acceptance, segments, output.logits, block, self.target.vocab_size)
        if decided is None:
            wait_for(output.logits)
        return decided

    def _reserve(self, plan: StepPlan, verify_lens: NDArray[np.int64]) -> None:
        for state, verify_len in zip(plan.decode, verify_lens.tolist(), strict=True):
            self.target_cache.reserve(state.row, 1 + verify_len)
        for chunk in plan.prefill:
            self.target_cache.reserve(chunk.state.row, chunk.num_tokens)

    def _record_batch(self, plan: StepPlan, num_drafts: int) -> None:
        record = self.record
        record.num_requests, record.num_prefill_tokens = len(plan.decode), plan.num_prefill_tokens
        record.num_drafting, record.num_looking_up = plan.num_drafting, len(plan.lookups)
        record.num_drafts_proposed += sum(len(lookup.draft_ids) for lookup in plan.lookups)
        record.num_drafts_verified = num_drafts
        record.batch_tokens = record.num_prefill_tokens + record.num_requests + num_drafts

    def _record_draft(self, states: Sequence[RequestState], block: DraftBlock) -> None:
        self.record.num_drafts_proposed += block.draft_ids.size
        for state in states:
            state.took_part(draft_ms=self.record.draft_ms)

    def _record_verification(self, plan: StepPlan) -> None:
        for state in plan.states:
            state.took_part(verify_ms=self.record.verify_ms)

    def _copy(self, source: int, destination: int, lengths: Sequence[int], states: Sequence[RequestState]) -> None:
        with timed_call(self.record, "copy_ms", states):
            for engine, num_positions in zip((self.target, self.drafter), lengths, strict=True):
                if engine is not None and num_positions:
                    engine.move_row(source, destination, num_positions)
