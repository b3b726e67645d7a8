"""Prompts begin where a KV row already holds their first tokens: those of a running request, or of one that has ended.

Rows stay dense (`runtime/rows.py`), so the rows behind the occupied ones are free. What an ended request leaves is kept
in one of them until the row is needed: the least recently used goes first, and rows that hold nothing before it. A new
request gets the first free row. What that row holds is moved away where another is worth less; then the longest prefix
is copied in, or stays where it is. Copying a position costs less than a hundredth of computing it.

Both caches count: K/V of the target and the drafter's context. A request that may draft takes only positions that the
context has too, or that wait for it as taps: a hole there would cost it its acceptance. What the context holds of a
position may depend on the token behind it (`IngestBatch`), so of n tokens in common it counts for n - 1.
The last tokens of a prompt are always computed: the logits of the last one are needed, and a call of a single token
rounds otherwise than the chunk of a prompt.

Where several requests with the same beginning arrive together, one reads it and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.engine_calls import EngineCalls
from dspark_trt.runtime.metrics import LoopTotals
from dspark_trt.runtime.pending_taps import TapChunk, for_long
from dspark_trt.runtime.rows import Rows
from dspark_trt.runtime.state import Phase, RequestState
from dspark_trt.runtime.timed_calls import EngineCallFailed

Int64 = NDArray[np.int64]

MIN_REUSED_TOKENS = 16  # less is not worth a copy
NUM_COMPUTED_TOKENS = 2  # of a prompt, at least
MIN_AWAITED_TOKENS = 32  # less is read twice rather than waited for
MAX_DROPPED_TOKENS = 16  # what a row holds is as good as contained in another one that lacks no more than these


@dataclass(frozen=True, slots=True)
class RetainedRow:
    """What an ended request left in a free row."""

    token_ids: Int64  # [n], of positions 0 .. n - 1 of the target's K/V
    num_context: int  # of these, how many the drafter's context has
    taps: tuple[TapChunk, ...]  # of the positions that follow in the context
    cache_salt: str
    last_used: int  # the larger, the later

    @property
    def num_known(self) -> int:
        """Positions that the drafter's context has, or can be given."""
        return self.num_context + _num_positions(self.taps)

    def covers(self, other: RetainedRow) -> bool:
        """Whether it has nearly all that `other` has."""
        if self.cache_salt != other.cache_salt or self.num_known + MAX_DROPPED_TOKENS < other.num_known:
            return False
        return _num_common(self.token_ids, other.token_ids) + MAX_DROPPED_TOKENS >= len(other.token_ids)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the beginning of a prompt is."""

    row: int
    num_positions: int
    num_context: int  # of these, in the drafter's context
    taps: tuple[TapChunk, ...]  # they begin with the others


class PrefixCache:
    """Reuses K/V between the requests of one loop. Called between engine calls, by the loop alone."""

    def __init__(self, engines: EngineCalls, rows: Rows[RequestState], totals: LoopTotals) -> None:
        self._engines = engines
        self._rows = rows
        self._totals = totals
        self._retained: dict[int, RetainedRow] = {}  # by row, of free rows only
        self._clock = 0

    def admit(self, state: RequestState) -> None:
        """`state` has just got its row: keep what is worth keeping of what the row held, and give it its prefix."""
        source = self._source(state)
        own = self._retained.pop(state.row, None)
        is_in_place = source is not None and source.row == state.row
        if own is not None:
            num_taken = source.num_positions if source is not None and is_in_place else 0
            if len(own.token_ids) - num_taken > MAX_DROPPED_TOKENS:
                is_sound = self._save(state.row, own, without=None if source is None else source.row)
                source = source if is_sound else None
        if source is not None and is_in_place:
            self._begin(state, source)
        else:
            self._begin_or_wait(state, source)

    def resume(self) -> None:
        """A step begins: requests that wait for another one's prefix take it where it is there."""
        for state in self._rows.occupants:
            if state.awaits_prefix and state.phase is Phase.PREFILL:
                self._begin_or_wait(state, self._source(state))

    def retain(self, state: RequestState) -> None:
        """`state` has ended and leaves its row, the highest of those that do."""
        num_positions = int(self._engines.target_cache.committed[state.row])
        token_ids = state.token_ids()[:num_positions]
        if state.has_failed or len(token_ids) < MIN_REUSED_TOKENS:
            return
        num_context = min(int(self._engines.context.cache.committed[state.row]), len(token_ids))
        taps = for_long(self._engines.context.waiting_taps(state))
        left = RetainedRow(token_ids, num_context, taps, state.request.cache_salt, self._tick())
        for row, retained in list(self._retained.items()):
            if left.covers(retained):
                del self._retained[row]
        if state.row == len(self._rows.occupants) - 1:
            self._retained[state.row] = left
        else:  # the last occupied row is about to move in
            self._save(state.row, left)

    def forget(self) -> None:
        """An engine call failed: what free rows hold is undefined."""
        self._retained.clear()

    def check_integrity(self) -> None:
        """Between two steps."""
        rows = self._retained
        assert all(len(self._rows.occupants) <= row < self._rows.num_rows for row in rows), "a kept row is not free"

    def _begin_or_wait(self, state: RequestState, source: _Source | None) -> None:
        num_lacking = self._num_coming(state) - (0 if source is None else source.num_positions)
        state.await_prefix(num_lacking >= (1 if state.awaits_prefix else MIN_AWAITED_TOKENS))
        if source is not None and not state.awaits_prefix:
            self._begin(state, source)

    def _begin(self, state: RequestState, source: _Source) -> None:
        try:
            self._engines.copy_row(source.row, state.row, source.num_positions, source.num_context)
        except EngineCallFailed:  # its prompt is read from the beginning
            self.forget()
            return
        self._engines.begin(state, source.num_positions, source.num_context, source.taps)
        self._totals.num_prompt_tokens_reused += source.num_positions
        used = self._retained.get(source.row)
        if used is None:
            return
        if len(used.token_ids) - source.num_positions <= MAX_DROPPED_TOKENS:
            del self._retained[source.row]
        else:
            self._retained[source.row] = replace(used, last_used=self._tick())

    def _save(self, row: int, content: RetainedRow, without: int | None = None) -> bool:
        """Copy what `row` holds to a free row that is worth less, if there is one; not to the row `without`.

        False: an engine failed.
        """
        free = [other for other in range(len(self._rows.occupants), self._rows.num_rows) if other != without]
        destination = min(free, key=self._last_used, default=row)
        if destination == row or self._last_used(destination) > content.last_used:
            return True
        try:
            self._engines.copy_row(row, destination, len(content.token_ids), content.num_context)
        except EngineCallFailed:
            self.forget()
            return False
        self._retained[destination] = content
        return True

    def _source(self, state: RequestState) -> _Source | None:
        """The longest prefix of a prompt; where several are equally long, the one that is in its own row already."""
        found = [*self._running(state), *self._kept(state)]
        longest = max(found, key=lambda source: (source.num_positions, source.row == state.row), default=None)
        return longest if longest is not None and longest.num_positions >= MIN_REUSED_TOKENS else None

    def _running(self, state: RequestState) -> Iterator[_Source]:
        """What requests that run hold of its prompt; of their own prompts only."""
        for other in self._rows.occupants:
            if other is state or other.request.cache_salt != state.request.cache_salt:
                continue
            num_context = int(self._engines.context.cache.committed[other.row])
            taps = self._engines.context.waiting_taps(other)
            yield self._usable(state, other.row, other.prompt_ids[: other.num_prefilled], num_context, taps)

    def _kept(self, state: RequestState) -> Iterator[_Source]:
        """What free rows hold of its prompt."""
        for row, retained in self._retained.items():
            if retained.cache_salt == state.request.cache_salt:
                yield self._usable(state, row, retained.token_ids, retained.num_context, retained.taps)

    def _usable(
        self, state: RequestState, row: int, token_ids: Int64, num_context: int, taps: tuple[TapChunk, ...]
    ) -> _Source:
        """What `state` can use of a row that holds `token_ids`."""
        num_common = _num_common(state.prompt_ids, token_ids)
        if not num_common:
            return _Source(row, 0, 0, ())
        num_positions = min(num_common, len(state.prompt_ids) - NUM_COMPUTED_TOKENS)
        num_usable = min(num_positions, num_common - 1, num_context)
        if num_usable < num_context:  # what follows there is of other tokens
            taps = ()
        if self._needs_context(state):
            num_positions = min(num_positions, num_usable + _num_positions(taps))
        return _Source(row, num_positions, num_usable, taps)

    def _num_coming(self, state: RequestState) -> int:
        """Tokens of its prompt that a request before it is about to read, and that it can have then."""
        coming = [
            min(
                _num_common(state.prompt_ids, other.prompt_ids) - self._needs_context(state),
                len(state.prompt_ids) - NUM_COMPUTED_TOKENS,
            )
            for other in self._rows.occupants
            if other.phase is Phase.PREFILL
            and other.generation < state.generation
            and other.request.cache_salt == state.request.cache_salt
            and (other.needs_taps or not self._needs_context(state))
        ]
        return max(coming, default=0)

    def _needs_context(self, state: RequestState) -> bool:
        return self._engines.drafter is not None and state.needs_taps

    def _last_used(self, row: int) -> int:
        """-1: a row that holds nothing."""
        retained = self._retained.get(row)
        return -1 if retained is None else retained.last_used

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _num_positions(taps: Sequence[TapChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in taps)


def _num_common(first: Int64, second: Int64) -> int:
    """Tokens that two sequences begin with in common; 0 where they are too few to be reused."""
    length = min(len(first), len(second))
    last = MIN_REUSED_TOKENS - 1
    if length <= last or first[last] != second[last]:  # most sequences differ by then
        return 0
    differs = first[:length] != second[:length]
    at = int(differs.argmax())
    return at if differs[at] else length
