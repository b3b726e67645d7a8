"""Signals while native code calls back into Python: an exception in a callback ends the callback, not its caller."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Within the block no signal that ends the program is heard; the yielded function hears it where it is wanted.

    At the end of the block it is heard in any case, also in place of what the block ends with: the handler that was
    there is called, and raises. Signals reach the main thread only: in another the block changes nothing, and neither
    does it where no Python function handles a signal.
    """
    noted: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def check() -> None:
        while noted:
            number, frame = noted.pop()
            handlers[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: noted.append((number, frame)))
    try:
        yield check
    finally:
        for handled, handler in handlers.items():
            signal.signal(handled, handler)
        check()
