"""Asks a running server, again and again, whether the thread that decodes still takes its turns."""

from __future__ import annotations

import logging
import threading
import time

from dspark_trt.server.http_calls import probe

logger = logging.getLogger(__name__)


class Prober:
    """One thread; `fault` may be asked at any time."""

    def __init__(self, http_url: str, interval_s: float, timeout_s: float) -> None:
        """Without an answered probe for `timeout_s` the server counts as hung."""
        self._http_url = http_url
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._answered_at = time.monotonic()
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="prober", daemon=True).start()

    def fault(self) -> str | None:
        silent_s = time.monotonic() - self._answered_at
        return f"it answered no probe for {silent_s:.0f} s" if silent_s > self._timeout_s else None

    def close(self) -> None:
        self._is_closed.set()

    def _run(self) -> None:
        while not self._is_closed.wait(self._interval_s):
            try:
                probe(self._http_url, timeout_s=self._timeout_s)
                self._answered_at = time.monotonic()
            except OSError as error:
                logger.info("a probe was not answered: %s", error)
