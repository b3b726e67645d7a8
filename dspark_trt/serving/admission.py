"""Who gets the next row, who is refused, who has waited too long.

The policy: the most urgent request first (the lowest `priority`), among equals the one that came first. A full queue
refuses the newcomer at once, unless a less urgent one waits, which is refused in its place. Whoever waits longer than
the queue time is refused. Every refusal says when to come again, from how fast rows became free lately.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

from dspark_trt.serving.failures import Failure
from dspark_trt.serving.limits import AdmissionLimits, retry_hint
from dspark_trt.serving.ticket import Ticket

_NUM_RATED = 64  # rows handed out, from which the rate is estimated


class AdmissionQueue:
    """The requests that wait for a row. Belongs to one thread."""

    def __init__(self, limits: AdmissionLimits, *, max_requests: int, now: Callable[[], float]) -> None:
        """`now`: seconds of a clock that never goes back."""
        self._limits = limits
        self._max_queued = limits.queue_size(max_requests)
        self._now = now
        self._numbers = count()
        self._waiting: list[tuple[int, int, Ticket]] = []  # by (priority, order of arrival)
        self._handed_out: deque[float] = deque(maxlen=_NUM_RATED)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for _, _, ticket in self._waiting)

    def offer(self, ticket: Ticket) -> Ticket | None:
        """Let a request wait. Returns the one for which there is no room: this one, or a less urgent one; else None."""
        insort(self._waiting, (ticket.request.priority, next(self._numbers), ticket))
        if len(self._waiting) <= self._max_queued:
            return None
        _, _, refused = self._waiting.pop()
        refused.end_with(
            Failure.UNAVAILABLE,
            f"the server is busy: {self._max_queued} requests wait for a row already; {self._hint()}",
        )
        return refused

    def pop(self) -> Ticket:
        """The request whose turn it is, for a row that is free."""
        self._handed_out.append(self._now())
        return self._waiting.pop(0)[2]

    def remove(self, ticket: Ticket) -> bool:
        """Take out a request that waits. False when it does not."""
        left = [entry for entry in self._waiting if entry[2] is not ticket]
        is_found = len(left) < len(self._waiting)
        self._waiting = left
        return is_found

    def take_expired(self) -> list[Ticket]:
        """The requests that have waited too long, or whose own time is over; they wait no more."""
        now = self._now()
        expired = []
        for ticket in self:
            if now >= ticket.ends_at:
                ticket.end_with(*ticket.timed_out())
                expired.append(ticket)
            elif now - ticket.arrived_at >= self._limits.max_queue_s:
                waited = f"the server is busy: no row became free within {self._limits.max_queue_s:g} s"
                ticket.end_with(Failure.UNAVAILABLE, f"{waited}; {self._hint()}")
                expired.append(ticket)
        for ticket in expired:
            self.remove(ticket)
        return expired

    def _hint(self) -> str:
        """When a request that comes now would have its turn, at the present rate."""
        if len(self._handed_out) < 2:
            return retry_hint(5)
        seconds_a_row = (self._now() - self._handed_out[0]) / (len(self._handed_out) - 1)
        return retry_hint(min(seconds_a_row * (len(self._waiting) + 1), 600.0))
