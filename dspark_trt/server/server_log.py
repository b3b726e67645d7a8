"""Where a server's messages go: a file, or standard error, as they are or as one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "fatal", "V": "debug"}
_TRITON = re.compile(r'(?P<level>[IWEFV])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (?P<where>[\w./-]+:\d+)\] "?(?P<message>.*?)"?$')
_IDS = re.compile(r"\b(request|internal error) (\d+|[0-9a-f]{8})\b")


# What Triton says on every host without a GPU, and means nothing there.
_NOISE = ("CudaDriverHelper has not been initialized", "unable to create stream for ensemble", "pinned system memory")


class ServerLog:
    """One server's log, through all its restarts."""

    def __init__(self, log_file: Path | None, log_format: str, *, is_quiet: bool) -> None:
        """`is_quiet`: leave out what means nothing; a log file has everything."""
        self._log_file = log_file
        self._is_json = log_format == "json"
        self._is_quiet = is_quiet
        self._is_new = True
        self._given: BinaryIO | int = -1

    def open(self) -> BinaryIO | int:
        """What the next process gets as its standard output. `opened` follows."""
        if self._log_file is not None:
            self._given = self._log_file.open("wb" if self._is_new else "ab")
        else:
            read, self._given = os.pipe()
            threading.Thread(target=self._pass_on, args=(read,), name="server-log", daemon=True).start()
        self._is_new = False
        return self._given

    def opened(self) -> None:
        """The process has its own copy now."""
        if isinstance(self._given, int):
            os.close(self._given)
        else:
            self._given.close()

    def _pass_on(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.strip() and not (self._is_quiet and any(noise in line for noise in _NOISE)):
                    text = json.dumps(as_record(line.rstrip("\n"))) if self._is_json else line.rstrip("\n")
                    say(text)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line for whoever started the server, on standard error or `stream`.

    A full disk or a reader that has gone costs the line, and nothing else: whoever is served is no part of it.
    """
    with contextlib.suppress(OSError, ValueError):  # the latter: it was closed
        print(text, file=stream or sys.stderr, flush=True)


def as_event(message: str) -> dict[str, Any]:
    """What `serve` itself has to say, as data."""
    return {"time": _now(), "level": "warning", "logger": "serve", "message": message}


def as_record(line: str) -> dict[str, Any]:
    """A line of Triton's log as data; ids of requests and errors in it as fields."""
    match = _TRITON.match(line)
    message = match["message"] if match else line
    record: dict[str, Any] = {
        "time": _now(),
        "level": _LEVELS[match["level"]] if match else "info",
        "logger": match["where"] if match else "tritonserver",
        "message": message,
    }
    for kind, found in _IDS.findall(message):
        record.setdefault({"request": "request_id", "internal error": "error_id"}[kind], found)
    return record


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
