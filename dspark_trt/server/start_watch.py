"""Looks after the processes of models while a server starts: one that ends then is waited for by Triton for minutes."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from urllib.error import HTTPError

from dspark_trt.server.http_calls import generate
from dspark_trt.server.processes import command_line, stubs_of_group

_POLL_S = 0.05
_INTERVAL_S = 0.25
_MAX_LOOKS = 8  # in a row: another server on PATH may replace the process that completes a configuration
_MODEL = re.compile(rb"/repository/(\w+)/1/model\.py")


class StartWatch:
    """One start of one server."""

    def __init__(self, group: int) -> None:
        """`group`: of the server's processes."""
        self._group = group
        self._most: Counter[bytes] = Counter()  # processes of a model that ran at the same time
        self._num_looks_short = 0
        self._looked_at = 0.0

    def fault(self) -> str | None:
        """Why the server will not come up; None while it may. To be asked again and again."""
        now = time.monotonic()
        if now - self._looked_at < _INTERVAL_S:
            return None
        self._looked_at = now
        running = Counter(
            match[1] for pid in stubs_of_group(self._group) if (match := _MODEL.search(command_line(pid)))
        )
        short = [model for model, most in self._most.items() if running[model] < most]
        self._num_looks_short = self._num_looks_short + 1 if short else 0
        self._most |= running
        if self._num_looks_short < _MAX_LOOKS:
            return None
        return f"a process of its model {short[0].decode()} ended while it started"


class FirstAnswer:
    """A real request to a server that says it is ready, asked in a thread, so that the server is looked after."""

    def __init__(self, http_url: str, timeout_s: float) -> None:
        self.error: str | None = None  # once it is not awaited any more
        self._http_url, self._timeout_s = http_url, timeout_s
        self._thread = threading.Thread(target=self._ask, name="first-answer", daemon=True)
        self._thread.start()

    def is_awaited(self) -> bool:
        """Waits for it for a moment."""
        self._thread.join(_POLL_S)
        return self._thread.is_alive()

    def _ask(self) -> None:
        try:
            generate(self._http_url, {"text_input": "Hello", "max_tokens": 1}, timeout_s=self._timeout_s)
        except HTTPError as error:
            self.error = error.read().decode(errors="replace")
        except OSError as error:
            self.error = str(error)
