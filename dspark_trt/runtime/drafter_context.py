"""The drafter's context: how far it reaches in each row, and the taps that wait to enter it.

Source: DESIGN section 3, Caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.protocol import DraftEngine, EngineLimits, IngestBatch, TargetOutput
from dspark_trt.runtime.acceptance import Acceptance
from dspark_trt.runtime.kv import CacheLengths
from dspark_trt.runtime.metrics import StepRecord
from dspark_trt.runtime.pages import BlockTables
from dspark_trt.runtime.pending_taps import PendingTaps, TapChunk
from dspark_trt.runtime.state import RequestState
from dspark_trt.runtime.timed_calls import timed_call
from dspark_trt.runtime.verification import Segment


@dataclass(frozen=True, slots=True)
class Ingest:
    """One call of the drafter, and whose taps it takes."""

    states: list[RequestState]
    batch: IngestBatch


class DrafterContext:
    """`drafter` is None where nothing is drafted: then nothing waits either."""

    def __init__(
        self,
        drafter: DraftEngine | None,
        limits: EngineLimits,
        *,
        keeps_taps: bool,
        tables: BlockTables | None = None,
    ) -> None:
        """keeps_taps: those of requests that draft no more stay while they have a row: others may need them. tables: of
        engines with pages."""
        self.cache = CacheLengths(num_rows=limits.max_requests, capacity=limits.max_seq_len)
        self._drafter = drafter
        self._tables = tables
        self._max_tokens = limits.max_batch_tokens
        self._keeps_taps = keeps_taps
        self._pending = PendingTaps()
        self._hurried: set[RequestState] = set()

    def keep_taps(
        self,
        segments: Sequence[Segment],
        results: Sequence[Acceptance],
        output: TargetOutput,
        token_ids: NDArray[np.int64],
    ) -> None:
        """Copy taps and ids of what this step committed, for the requests that go on drafting.

        token_ids [T] of the packed call.
        """
        if self._drafter is None:
            return
        committed, done = [], []
        for segment, result in zip(segments, results, strict=True):
            if segment.state.needs_taps:
                committed.append((segment.state, segment.first_token, result.num_committed(segment)))
            else:
                done.append(segment.state)
        if not self._keeps_taps:
            self._pending.drop(done)
        self._pending.keep(committed, output.taps, token_ids)

    def all_but_last(self, drafting: Sequence[RequestState], record: StepRecord) -> Ingest | None:
        """Take the taps of requests that draft, and of those whose taps have waited too long.

        Returns the last call instead of making it: a drafter makes it together with the draft. The lengths count from
        now on; where the call fails, its requests end.
        """
        if self._drafter is None:
            return None
        overdue = self._pending.overdue()
        overdue += [state for state in self._hurried if state not in overdue and self._pending.num_positions(state)]
        self._hurried.clear()
        if not drafting and not overdue:
            return None
        states = [*drafting, *(state for state in overdue if state not in drafting)]
        last: Ingest | None = None
        while any(self._pending.num_positions(state) for state in states):
            self.ingest(last, record)  # before more is taken: where it fails, only its own requests end
            taken = self._pending.take(states, self.cache, self._max_tokens)
            assert taken is not None, "taps wait"
            states_taken, batch = taken
            if self._tables is not None:
                batch = replace(batch, block_tables=self._tables.tables(batch.rows))
            last = Ingest(states_taken, batch)
            for state, num_positions in zip(last.states, last.batch.query_lengths.tolist(), strict=True):
                self.cache.reserve(state.row, num_positions)
                self.cache.commit(state.row, num_positions)
            record.num_ingested_tokens += int(last.batch.query_lengths.sum())
        return last

    def ingest(self, ingest: Ingest | None, record: StepRecord) -> None:
        """Make the call, if there is one. Raises EngineCallFailed."""
        if ingest is not None:
            assert self._drafter is not None, "taps are kept for a drafter"
            with timed_call(record, "ingest_ms", ingest.states):
                self._drafter.ingest(ingest.batch)

    def begin(self, state: RequestState, num_positions: int, taps: Sequence[TapChunk], num_missing: int) -> None:
        """A request's row holds the first positions of its prompt already. taps: begin with the `num_missing` positions
        that follow."""
        self.cache.begin(state.row, num_positions)
        if self._drafter is not None and state.needs_taps:
            self._pending.begin(state, taps, num_missing)

    def hurry(self, state: RequestState) -> None:
        """Bring the context of a request up in the next step, whether it drafts or not: others wait for it."""
        self._hurried.add(state)

    def waiting_taps(self, state: RequestState) -> tuple[TapChunk, ...]:
        """What the context of a request lacks and can be given."""
        return self._pending.waiting(state)

    def release(self, state: RequestState) -> None:
        """A request leaves its row."""
        self._hurried.discard(state)
        self._pending.drop([state])
        self.cache.clear(state.row)

    def num_known(self, state: RequestState) -> int:
        """Positions of a request that are in its context or wait for it."""
        return int(self.cache.committed[state.row]) + self._pending.num_positions(state)
