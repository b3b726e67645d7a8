"""Asks a process, again and again, whether it still answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_STANDSTILL_S = 5.0  # between two calls of `fault`, which come several times a second


class Prober:
    """One thread; `fault` is for one other."""

    def __init__(self, ask: Callable[[], None], interval_s: float, timeout_s: float) -> None:
        """`ask` raises OSError without an answer; after `timeout_s` without one the process counts as hung."""
        self._ask = ask
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._answered_at = self._looked_at = time.monotonic()
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="prober", daemon=True).start()

    def fault(self) -> str | None:
        """To be asked several times a second: a longer pause means that this process, which asks, stood still, as when
        it or its machine was suspended. Then nothing is known, and the time begins anew."""
        now = time.monotonic()
        if now - self._looked_at > _STANDSTILL_S:
            self._answered_at = now
        self._looked_at = now
        silent_s = now - self._answered_at
        return f"it answered no probe for {silent_s:.0f} s" if silent_s > self._timeout_s else None

    def close(self) -> None:
        self._is_closed.set()

    def _run(self) -> None:
        while not self._is_closed.wait(self._interval_s):
            try:
                self._ask()
                self._answered_at = time.monotonic()
            except OSError as error:
                logger.info("a probe was not answered: %s", error)
