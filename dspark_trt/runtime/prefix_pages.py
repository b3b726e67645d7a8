"""Prompts begin with pages that hold their first tokens already: those of requests that run, or that have ended.

A full page has a key: a hash of its tokens, of the token behind them, and of the key of the page before. Equal keys
mean equal beginnings, so a new prompt takes the pages of the longest chain of keys that is known, and reads the rest.
Pages are shared, never copied, and stay known while they are free, until somebody else takes them.

Both caches count: a page has a key once it is full in the target's K/V and in the drafter's context. The token behind
it belongs to the key because what a context holds of a position may depend on the next token (`IngestBatch`). The last
tokens of a prompt are always computed: the logits of the last one are needed, and a call of a single token rounds
otherwise than the chunk of a prompt.

Where several requests with the same beginning arrive together, one reads it and the others wait for it.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.engine_calls import EngineCalls
from dspark_trt.runtime.metrics import LoopTotals
from dspark_trt.runtime.pages import NO_PAGE, BlockTables
from dspark_trt.runtime.rows import Rows
from dspark_trt.runtime.state import Phase, RequestState

NUM_COMPUTED_TOKENS = 2  # of a prompt, at least


class PrefixPages:
    """Reuses pages between the requests of one loop. Called between engine calls, by the loop alone."""

    def __init__(self, engines: EngineCalls, tables: BlockTables, rows: Rows[RequestState], totals: LoopTotals) -> None:
        self._engines = engines
        self._tables = tables
        self._rows = rows
        self._totals = totals
        self._page_positions = tables.limits.page_positions
        self._keys: dict[RequestState, list[bytes]] = {}  # of the pages that a request fills
        self._num_named: dict[RequestState, int] = {}  # of these, how many have their key in the pool

    def usable(self, state: RequestState) -> list[int]:
        """The pages that a request begins with if it gets a row now: none where it would wait for another one's."""
        pages = self._known(state)
        return [] if self._num_coming(state) > len(pages) else pages

    def begin(self, state: RequestState, shared: list[int]) -> None:
        """`state` has just got its row and all its pages, the first of which are `shared`, as `usable` gave them."""
        state.await_prefix(self._num_coming(state) > len(self._known(state)))
        if not shared:
            return
        num_positions = len(shared) * self._page_positions
        self._engines.begin(state, num_positions, num_positions, ())
        self._num_named[state] = len(shared)
        self._totals.num_prompt_tokens_reused += num_positions

    def resume(self) -> None:
        """A step begins: pages that the last one filled are known, and requests that wait for them take them."""
        for state in [state for state in self._keys if state.phase is Phase.FINISHED]:
            del self._keys[state]
        for state in self._rows.occupants:
            self._name(state)
        for state in self._rows.occupants:
            if state.awaits_prefix and state.phase is Phase.PREFILL:
                shared = self.usable(state)
                if shared:
                    self._tables.begin(state.row, shared)
                self.begin(state, shared)
                for other in self._before(state) if state.awaits_prefix else ():
                    self._engines.context.hurry(other)

    def retain(self, state: RequestState) -> None:
        """`state` leaves its row."""
        if not state.has_failed:
            self._name(state)
        self._num_named.pop(state, None)

    def forget(self) -> None:
        """An engine call failed: what pages hold is not trusted."""
        self._tables.pool.forget()

    def check_integrity(self) -> None:
        """Between two steps."""
        assert all(state in self._rows.occupants for state in self._num_named), "a request that left is still counted"

    def _known(self, state: RequestState) -> list[int]:
        """The pages that hold the beginning of what a request has to read."""
        pages = []
        for key in self._keys_of(state, state.context_ids)[: self._most(state)]:
            page = self._tables.pool.find(key)
            if page == NO_PAGE:
                break
            pages.append(page)
        return pages

    def _name(self, state: RequestState) -> None:
        """Give the pages that a request has filled their keys."""
        num_positions = int(self._engines.target_cache.committed[state.row])
        if self._engines.drafter is not None:
            num_positions = min(num_positions, int(self._engines.context.cache.committed[state.row]))
        begin = self._num_named.get(state, 0)
        if num_positions // self._page_positions <= begin:
            return
        token_ids = state.token_ids()
        num_full = min(num_positions, len(token_ids) - 1) // self._page_positions
        keys, pages = self._keys_of(state, token_ids), self._tables.pages_of(state.row)
        for at in range(begin, num_full):
            self._tables.pool.name(pages[at], keys[at])
        self._num_named[state] = max(num_full, begin)

    def _num_coming(self, state: RequestState) -> int:
        """Pages of its beginning that a request before it is about to fill, in both caches."""
        keys = self._keys_of(state, state.context_ids)[: self._most(state)]
        coming = [_num_common(keys, self._keys_of(other, other.context_ids)) for other in self._before(state)]
        return max(coming, default=0)

    def _before(self, state: RequestState) -> list[RequestState]:
        """Requests before it that read their prompts, or whose context, which it needs too, lacks a part of them."""
        needs_context = self._engines.drafter is not None and state.needs_taps
        context = self._engines.context.cache.committed
        return [
            other
            for other in self._rows.occupants
            if (state.phase is Phase.QUEUED or other.generation < state.generation)
            and (other.needs_taps or not needs_context)
            and (other.phase is Phase.PREFILL or (needs_context and context[other.row] < len(other.context_ids)))
        ]

    def _most(self, state: RequestState) -> int:
        """Pages that a request may share: some of its tokens are computed."""
        return max(len(state.context_ids) - NUM_COMPUTED_TOKENS, 0) // self._page_positions

    def _keys_of(self, state: RequestState, token_ids: NDArray[np.int64]) -> list[bytes]:
        """Of every page of `token_ids` that is full and has a token behind it. They begin as those of an earlier call:
        tokens of a request are only added."""
        keys, size = self._keys.setdefault(state, []), self._page_positions
        while (len(keys) + 1) * size < len(token_ids):
            begin = len(keys) * size
            before = keys[-1] if keys else state.request.cache_salt.encode()
            digest = blake2b(before, digest_size=16, person=b"dspark-page-1")
            digest.update(token_ids[begin : begin + size + 1].astype("<i8").tobytes())
            keys.append(digest.digest())
        return keys


def _num_common(first: list[bytes], second: list[bytes]) -> int:
    """Keys that two chains begin with in common."""
    return next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
