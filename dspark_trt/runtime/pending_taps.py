"""Taps and ids of committed positions that the drafter's context does not have yet.

Shape letters: `T` tokens, `M`*`D` tap width. Source: DESIGN section 3, Caches.

A step that does not draft for a request may leave its taps here, so that not drafting costs next to nothing and
drafting resumes without loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from dspark_trt.contract.protocol import IngestBatch
from dspark_trt.runtime.arrays import take_rows
from dspark_trt.runtime.kv import CacheLengths
from dspark_trt.runtime.state import RequestState

Array = Any  # of the engine's library

MAX_PENDING_POSITIONS = 128  # of a request; more are brought up although nothing is drafted


class TapChunk(NamedTuple):
    """Consecutive positions of one request in the copy that a step made."""

    taps: Array  # [T, M*D] of the whole step
    first: int
    token_ids: NDArray[np.int64]  # of its positions

    def split(self, count: int) -> tuple[TapChunk, TapChunk]:
        """The first `count` positions, and the rest."""
        return TapChunk(self.taps, self.first, self.token_ids[:count]), TapChunk(
            self.taps, self.first + count, self.token_ids[count:]
        )


class PendingTaps:
    """Per request, in the order of positions."""

    def __init__(self) -> None:
        self._chunks: dict[RequestState, list[TapChunk]] = {}
        self._counts: dict[RequestState, int] = {}  # positions of the chunks

    def keep(
        self, committed: Sequence[tuple[RequestState, int, int]], taps: Array, token_ids: NDArray[np.int64]
    ) -> None:
        """Copy what a step committed, since the target's buffer is used again: (request, its first token, how many).

        token_ids [T] of the step's packed call; they are not written again.
        """
        if not committed:
            return
        copy = take_rows(taps, [at for _, first, count in committed for at in range(first, first + count)])
        begin = 0
        for state, first, count in committed:
            chunk = TapChunk(copy, begin, token_ids[first : first + count])
            if state in self._chunks:
                self._chunks[state].append(chunk)
                self._counts[state] += count
            else:
                self._chunks[state], self._counts[state] = [chunk], count
            begin += count

    def num_positions(self, state: RequestState) -> int:
        return self._counts.get(state, 0)

    def waiting(self, state: RequestState) -> tuple[TapChunk, ...]:
        """What waits for a request, position after position."""
        return tuple(self._chunks.get(state, ()))

    def begin(self, state: RequestState, chunks: Sequence[TapChunk], num_positions: int) -> None:
        """The first positions that waited for another request wait for this one, whose prompt begins alike."""
        first = first_positions(chunks, num_positions)
        if first:
            self._chunks[state], self._counts[state] = first, num_positions

    def overdue(self) -> list[RequestState]:
        """Requests with more than may wait, of those that may still draft."""
        return [state for state, count in self._counts.items() if count > MAX_PENDING_POSITIONS and state.needs_taps]

    def drop(self, states: Iterable[RequestState]) -> None:
        """Forget requests that have ended or will not draft again."""
        for state in states:
            self._chunks.pop(state, None)
            self._counts.pop(state, None)

    def take(
        self, states: Sequence[RequestState], context: CacheLengths, max_tokens: int
    ) -> tuple[list[RequestState], IngestBatch] | None:
        """The taps of `states` as one call, of at most max_tokens; call again until there is None."""
        taken: list[RequestState] = []
        counts: list[int] = []
        following: list[int] = []  # the token behind the positions taken, of each request
        chunks: list[TapChunk] = []
        room = max_tokens
        for state in states:
            if state not in self._chunks or not room:
                continue
            count = self._counts[state]
            if count <= room:
                chunks += self._chunks.pop(state)
                del self._counts[state]
                following.append(state.next_id)
            else:
                count = room
                chunks += self._first(state, count)
                following.append(int(self._chunks[state][0].token_ids[0]))
            room -= count
            taken.append(state)
            counts.append(count)
        if not taken:
            return None
        rows = np.array([state.row for state in taken], dtype=np.int64)
        query_lengths = np.array(counts, dtype=np.int64)
        token_ids = np.concatenate([chunk.token_ids for chunk in chunks])
        next_ids = np.append(token_ids[1:], 0)
        next_ids[query_lengths.cumsum() - 1] = following
        return taken, IngestBatch(
            taps=_joined(chunks),
            rows=rows,
            past_lengths=context.committed[rows],
            query_lengths=query_lengths,
            token_ids=token_ids,
            next_ids=next_ids,
        )

    def _first(self, state: RequestState, count: int) -> list[TapChunk]:
        """Take the first `count` positions of a request that has more."""
        waiting, taken = self._chunks[state], list[TapChunk]()
        self._counts[state] -= count
        while count:
            chunk = waiting.pop(0)
            if len(chunk.token_ids) > count:
                chunk, rest = chunk.split(count)
                waiting.insert(0, rest)
            taken.append(chunk)
            count -= len(chunk.token_ids)
        return taken


def first_positions(chunks: Sequence[TapChunk], num_positions: int) -> list[TapChunk]:
    """Of consecutive chunks."""
    first: list[TapChunk] = []
    for chunk in chunks:
        if num_positions:
            first.append(chunk.split(num_positions)[0])
            num_positions -= len(first[-1].token_ids)
    assert not num_positions, "fewer taps wait"
    return first


def for_long(chunks: Sequence[TapChunk]) -> tuple[TapChunk, ...]:
    """As many positions of `chunks` as may wait, in memory of their own."""
    count = min(sum(len(chunk.token_ids) for chunk in chunks), MAX_PENDING_POSITIONS)
    if not count:
        return ()
    first = first_positions(chunks, count)
    token_ids = np.concatenate([chunk.token_ids for chunk in first])
    return (TapChunk(take_rows(_joined(first), list(range(count))), 0, token_ids),)


def _joined(chunks: Sequence[TapChunk]) -> Array:
    """One array of all chunks; no copy where they stand one behind the other already."""
    first = chunks[0]
    end = first.first
    for chunk in chunks:
        if chunk.taps is not first.taps or chunk.first != end:
            xp = array_namespace(first.taps)
            return xp.concat([chunk.taps[chunk.first : chunk.first + len(chunk.token_ids), :] for chunk in chunks])
        end += len(chunk.token_ids)
    return first.taps[first.first : end, :]
