"""Ctrl-C while native code calls back into Python:
an exception in a callback ends the callback, not what it is called from."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Within the block SIGINT raises nothing; the yielded function raises the KeyboardInterrupt where it is wanted.

    At the end of the block it is raised in any case, also in place of what the block ends with. Signals reach the main
    thread only: in another, or where a program handles SIGINT itself, the block changes nothing.
    """
    is_interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True

    def check() -> None:
        if is_interrupted:
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        check()
