"""The signals that ask a server to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


def stop_signals() -> tuple[signal.Signals, ...]:
    """A hang-up ends it too, unless it was started to outlive its terminal (nohup).

    SIGINT does even where it is ignored: a shell starts every background process so.
    """
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hang_up)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """An impatient second signal must not interrupt the clean-up, which is bounded in time.

    Blocking signals in this thread would not do: any other thread takes them, and Python then runs the handler here.
    """
    if threading.current_thread() is not threading.main_thread():  # no handler runs in this thread
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """A signal that comes within the block counts when the block is over: none interrupts it, and none is lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _deliver(came)


def _deliver(numbers: list[int]) -> None:
    """Also where the first of them raises: a second one may mean something else."""
    interrupt: KeyboardInterrupt | None = None
    for number in numbers:
        handler = signal.getsignal(number)
        try:
            if callable(handler):
                handler(number, None)
            else:
                signal.raise_signal(number)
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
