"""Where a server's messages go: a file, this process's standard error as they are, or there as one JSON object a line."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "fatal", "V": "debug"}
_TRITON = re.compile(r'(?P<level>[IWEFV])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (?P<where>[\w./-]+:\d+)\] "?(?P<message>.*?)"?$')
_IDS = re.compile(r"\b(request|internal error) (\w+)")


class ServerLog:
    """One server's log, through all its restarts."""

    def __init__(self, log_file: Path | None, log_format: str) -> None:
        self._log_file = log_file
        self._log_format = log_format
        self._is_new = True
        self._given: BinaryIO | int | None = None

    def open(self) -> BinaryIO | int | None:
        """What the next process gets as its standard output; None: this process's own. `opened` follows."""
        if self._log_file is not None:
            self._given = self._log_file.open("wb" if self._is_new else "ab")
        elif self._log_format == "json":
            read, self._given = os.pipe()
            threading.Thread(target=_translate, args=(read,), name="server-log", daemon=True).start()
        self._is_new = False
        return self._given

    def opened(self) -> None:
        """The process has its own copy now."""
        if isinstance(self._given, int):
            os.close(self._given)
        elif self._given is not None:
            self._given.close()
        self._given = None


def _translate(descriptor: int) -> None:
    with open(descriptor, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.strip():
                print(json.dumps(as_record(line.rstrip("\n"))), file=sys.stderr, flush=True)


def as_record(line: str, *, now: datetime | None = None) -> dict[str, Any]:
    """A line of Triton's log as data; ids of requests and errors in it as fields."""
    match = _TRITON.match(line)
    message = match["message"] if match else line
    record: dict[str, Any] = {
        "time": (now or datetime.now(UTC)).isoformat(timespec="milliseconds"),
        "level": _LEVELS[match["level"]] if match else "info",
        "logger": match["where"] if match else "tritonserver",
        "message": message,
    }
    for kind, found in _IDS.findall(message):
        record.setdefault({"request": "request_id", "internal error": "error_id"}[kind], found)
    return record
