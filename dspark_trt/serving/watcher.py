"""Finds out which clients have left, beside the decoding loop, so that no step waits for the answer.

Whoever asked the engine model itself is asked for with `is_cancelled`, which costs up to 0.15 ms a request. Triton
never tells an ensemble's running step, so a request that came through the ensemble is sent a ping where nothing else
was sent for a while: its way leads through postprocessing, and there Triton tells. The client itself never sees it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from threading import Event

from dspark_trt.serving.adapter import StopCommand
from dspark_trt.serving.ticket import Ticket

_PING_INTERVAL_S = 0.5
_MAX_PINGS_PER_S = 250  # about a twentieth of a core
_MIN_PAUSE_S = 0.01
_MAX_PAUSE_S = 0.25
_WORK_SHARE = 0.2  # of this thread's time, at most: the loop thread shares the interpreter with it


class Watcher:
    """`run` is a thread's; `look` and `close` are called from others and return at once."""

    def __init__(self, send: Callable[[Callable[[], None]], None], stop: Callable[[StopCommand], None]) -> None:
        self._send = send
        self._stop = stop
        self._something_happened = Event()
        self._is_closed = False
        self._tickets: tuple[Ticket, ...] = ()

    def look(self, running: Mapping[str, Ticket], waiting: Iterable[Ticket]) -> None:
        """After a step: who runs, and who waits."""
        if not self._something_happened.is_set():  # the last look is over
            self._tickets = (*running.values(), *waiting)
            self._something_happened.set()

    def close(self) -> None:
        self._is_closed = True
        self._something_happened.set()

    def run(self) -> None:
        while True:
            self._something_happened.wait()
            if self._is_closed:
                return
            started = time.monotonic()
            for ticket in self._tickets:
                self._ask(ticket, started, max(_PING_INTERVAL_S, len(self._tickets) / _MAX_PINGS_PER_S))
            self._tickets = ()
            took = time.monotonic() - started
            time.sleep(min(max(took / _WORK_SHARE, _MIN_PAUSE_S), _MAX_PAUSE_S))
            self._something_happened.clear()
            if self._is_closed:
                return

    def _ask(self, ticket: Ticket, now: float, interval_s: float) -> None:
        if ticket.is_closed:
            return
        if ticket.request.is_in_ensemble:
            if now - max(ticket.sent_at, ticket.arrived_at) >= interval_s:
                ticket.sent_at = now
                self._send(lambda: self._ping(ticket))
        elif ticket.reply.is_cancelled():
            self._stop(StopCommand(ticket.request.handle, ""))

    def _ping(self, ticket: Ticket) -> None:
        if not ticket.ping(time.monotonic()):
            self._stop(StopCommand(ticket.request.handle, ""))
