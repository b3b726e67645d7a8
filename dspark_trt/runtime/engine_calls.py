"""The engines and the lengths of their caches: every call reserves, is timed, and fails for its requests alone.

What is timed: `draft_ms` ends when the drafts are known to the host, `verify_ms` when the logits are, or what became of
the drafts where an engine accepts them. Where a
StepEngine does both in one call, `draft_ms` holds the call, the draft and its selection, and `verify_ms` what the
verification takes from there on; an engine that computes everything before it returns leaves nothing to `verify_ms`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.acceptance import AcceptEngine
from dspark_trt.contract.protocol import (
    DraftBatch,
    DraftEngine,
    IngestBatch,
    SelectBatch,
    StepEngine,
    TargetEngine,
    TargetOutput,
)
from dspark_trt.errors import CapacityError
from dspark_trt.runtime.acceptance import Acceptance
from dspark_trt.runtime.arrays import wait_for
from dspark_trt.runtime.drafting import DraftBlock, DraftVocabulary, draft_batch, draft_block
from dspark_trt.runtime.fused_acceptance import Decided, decide
from dspark_trt.runtime.kv import CacheLengths
from dspark_trt.runtime.metrics import StepRecord
from dspark_trt.runtime.pending_taps import PendingTaps, TapChunk
from dspark_trt.runtime.rows import RowMove
from dspark_trt.runtime.state import RequestState
from dspark_trt.runtime.step_plan import StepPlan
from dspark_trt.runtime.verification import Segment, check_selection, num_selected, pack

logger = logging.getLogger(__name__)


class EngineCallFailed(Exception):
    """An engine call raised. The K/V of its requests are undefined: the requests cannot go on."""

    def __init__(self, states: Sequence[RequestState]) -> None:
        super().__init__(f"an engine call failed for {len(states)} requests")
        self.states = states


@dataclass(frozen=True, slots=True)
class _Ingest:
    """One call of the drafter, and whose taps it takes."""

    states: list[RequestState]
    batch: IngestBatch


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
        self.context_cache = CacheLengths(num_rows=limits.max_requests, capacity=limits.max_seq_len)
        self.record = StepRecord()  # of the step that is running
        self._pending = PendingTaps()
        self._keeps_taps = keeps_taps
        self._packed_ids = np.empty(0, dtype=np.int64)  # [T] of the step's verification
        vocab = None if drafter is None else drafter.draft_vocab
        self._draft_vocabulary = DraftVocabulary.of(vocab, target.vocab_size)

    def keep_taps(self, segments: Sequence[Segment], results: Sequence[Acceptance], output: TargetOutput) -> None:
        """Copy taps and ids of what this step committed, for the requests that go on drafting."""
        if self.drafter is None:
            return
        committed, done = [], []
        for segment, result in zip(segments, results, strict=True):
            if segment.state.needs_taps:
                committed.append((segment.state, segment.first_token, result.num_committed(segment)))
            else:
                done.append(segment.state)
        if not self._keeps_taps:
            self._pending.drop(done)
        self._pending.keep(committed, output.taps, self._packed_ids)

    def num_pending(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions that the drafter's context lacks, of the requests in these rows."""
        missing: NDArray[np.int64] = self.target_cache.committed[rows] - self.context_cache.committed[rows]
        return missing

    def draft(self, states: Sequence[RequestState], num_slots: int) -> DraftBlock | None:
        """One draft block for each request, after its context was brought up to the anchor; None without requests.

        Taps of other requests that have waited too long are ingested, too.
        """
        ingest = self._ingest_all_but_last(states)
        if not states:
            self._ingest(ingest)
            return None
        assert self.drafter is not None, "caps are 0 without a drafter"
        batch = self._draft_batch(states, num_slots)
        involved = [*states, *(state for state in ingest.states if state not in states)] if ingest else states
        with self._call("draft_ms", involved):
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
        with self._call("verify_ms", plan.states):
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
        self._ingest(self._ingest_all_but_last(plan.drafting))
        batch = self._draft_batch(plan.drafting, plan.num_slots)
        plain, _ = pack(plan, np.zeros_like(plan.caps), None, self.target_cache)
        self._reserve(plan, plan.caps)
        self._record_batch(plan, num_selected(select))
        with self._call("draft_ms", plan.states):
            output = self.step_engine.draft_and_verify(batch, select, plain)
            drafts = output.wait()
            check_selection(select, drafts.verify_lens)
            block = self._block(batch, output.draft_logits, drafts.draft_ids, drafts.confidence_logits)
        self._record_draft(plan.drafting, block)
        packed, segments = pack(plan, drafts.verify_lens, block, self.target_cache)
        self._packed_ids = packed.token_ids
        with self._call("verify_ms", plan.states):
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
        lengths = [int(cache.committed[source]) for cache in (self.target_cache, self.context_cache)]
        self.target_cache.move(source, destination)
        self.context_cache.move(source, destination)
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
        self.context_cache.begin(state.row, num_context)
        state.reuse_prompt(num_positions)
        if self.drafter is not None and state.needs_taps:
            self._pending.begin(state, taps, num_positions - num_context)

    def waiting_taps(self, state: RequestState) -> tuple[TapChunk, ...]:
        """What the context of a request lacks and can be given."""
        return self._pending.waiting(state)

    def release(self, state: RequestState) -> None:
        """A request leaves its row."""
        self._pending.drop([state])
        self.target_cache.clear(state.row)
        self.context_cache.clear(state.row)

    def check_integrity(self, occupants: Sequence[RequestState]) -> None:
        """Between two steps; `occupants[row]` lives in that row."""
        for cache in (self.target_cache, self.context_cache):
            cache.check_integrity(len(occupants))
        for state in occupants:
            if self.drafter is not None and state.needs_taps:
                num_known = int(self.context_cache.committed[state.row]) + self._pending.num_positions(state)
                assert num_known == self.target_cache.committed[state.row], "taps were lost"
            num_positions = int(self.target_cache.committed[state.row])
            num_tokens = state.num_prefilled + max(state.num_generated - 1, 0)
            assert num_positions == num_tokens, (
                f"{state.request.request_id}: {num_positions} positions, {num_tokens} tokens"
            )

    def _ingest_all_but_last(self, drafting: Sequence[RequestState]) -> _Ingest | None:
        """Take the taps of requests that draft, and of those whose taps have waited too long.

        Returns the last call instead of making it: a drafter makes it together with the draft. The lengths count from
        now on; where the call fails, its requests end.
        """
        if self.drafter is None:
            return None
        overdue = self._pending.overdue()
        if not drafting and not overdue:
            return None
        states = [*drafting, *(state for state in overdue if state not in drafting)]
        last: _Ingest | None = None
        while (
            taken := self._pending.take(states, self.context_cache, self.target.limits.max_batch_tokens)
        ) is not None:
            self._ingest(last)
            last = _Ingest(*taken)
            for state, num_positions in zip(last.states, last.batch.query_lengths.tolist(), strict=True):
                self.context_cache.reserve(state.row, num_positions)
                self.context_cache.commit(state.row, num_positions)
            self.record.num_ingested_tokens += int(last.batch.query_lengths.sum())
        return last

    def _ingest(self, ingest: _Ingest | None) -> None:
        if ingest is not None:
            assert self.drafter is not None, "taps are kept for a drafter"
            with self._call("ingest_ms", ingest.states):
                self.drafter.ingest(ingest.batch)

    def _draft_batch(self, states: Sequence[RequestState], num_slots: int) -> DraftBatch:
        rows = [state.row for state in states]
        assert (self.context_cache.committed[rows] == self.target_cache.committed[rows]).all(), "context lags behind"
        return draft_batch(states, self.context_cache, num_slots)

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
        record.num_drafting, record.num_explored = plan.num_drafting, int(np.count_nonzero(plan.is_explored))
        record.num_looking_up = len(plan.lookups)
        record.num_drafts_proposed += sum(len(lookup.draft_ids) for lookup in plan.lookups)
        record.num_drafts_verified = num_drafts
        record.batch_tokens = record.num_prefill_tokens + record.num_requests + num_drafts

    def _record_draft(self, states: Sequence[RequestState], block: DraftBlock) -> None:
        self.record.num_drafts_proposed += block.draft_ids.size
        for state in states:
            state.statistics.draft_ms += self.record.draft_ms

    def _record_verification(self, plan: StepPlan) -> None:
        for state in plan.states:
            state.statistics.verify_ms += self.record.verify_ms

    def _copy(self, source: int, destination: int, lengths: Sequence[int], states: Sequence[RequestState]) -> None:
        with self._call("copy_ms", states):
            for engine, num_positions in zip((self.target, self.drafter), lengths, strict=True):
                if engine is not None and num_positions:
                    engine.move_row(source, destination, num_positions)

    @contextmanager
    def _call(
        self, timed_as: Literal["ingest_ms", "draft_ms", "verify_ms", "copy_ms"], states: Sequence[RequestState]
    ) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except Exception as error:  # whatever a backend raises: it is logged in full, the client hears none of it
            logger.exception("an engine call failed; its %d requests end with an error", len(states))
            raise EngineCallFailed(states) from error
        finally:
            elapsed_ms = (time.perf_counter() - started) * 1e3
            setattr(self.record, timed_as, getattr(self.record, timed_as) + elapsed_ms)
