"""Whether there are pages for a request, and who gives his up where there are none.

A request takes the pages of all that it has to read when it gets its row, and one more whenever a step may reach beyond
what it has. Where no page is left for that, the youngest request loses its own and is read again later: so the oldest
one always goes on. Who waits for a row also leaves a page for each request that runs, which would push it out again.
"""

from __future__ import annotations

from dspark_trt.runtime.engine_calls import EngineCalls
from dspark_trt.runtime.pages import BlockTables
from dspark_trt.runtime.prefix_pages import PrefixPages
from dspark_trt.runtime.rows import Rows
from dspark_trt.runtime.state import Phase, RequestState


class PageRoom:
    """Gives pages to requests, for one loop."""

    def __init__(
        self,
        engines: EngineCalls,
        tables: BlockTables,
        rows: Rows[RequestState],
        prefixes: PrefixPages | None,
    ) -> None:
        self._engines = engines
        self._tables = tables
        self._rows = rows
        self._prefixes = prefixes

    def is_enough_for(self, state: RequestState) -> bool:
        """Whether a request that waits may get a row now."""
        shared = [] if self._prefixes is None else self._prefixes.usable(state)
        num_pages = self._tables.limits.pages_for(self._engines.num_positions_ahead(state)) - len(shared)
        num_free = self._tables.pool.num_free - sum(map(self._tables.pool.is_free, shared))
        return num_pages + len(self._rows.occupants) <= num_free

    def admit(self, state: RequestState) -> None:
        """`state`, for which there is enough, has just got its row."""
        shared = [] if self._prefixes is None else self._prefixes.usable(state)
        self._tables.begin(state.row, shared)
        is_grown = self._tables.grow(state.row, self._engines.num_positions_ahead(state))
        assert is_grown, "ask is_enough_for first"
        if self._prefixes is not None:
            self._prefixes.begin(state, shared)

    def make(self) -> RequestState | None:
        """Give every request that decodes the pages of the next step, the oldest first. Returns the request that has to
        leave its row for that: call again without it."""
        by_age = sorted(self._rows.occupants, key=_age)
        for state in by_age:
            if state.phase is Phase.DECODE and not self._tables.grow(
                state.row, self._engines.num_positions_ahead(state)
            ):
                assert len(by_age) > 1, "a request fits alone"
                return by_age[-1]
        return None


def _age(state: RequestState) -> tuple[float, int]:
    """The larger, the younger."""
    return (state.submitted_at, state.generation)
