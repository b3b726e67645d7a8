"""The private way from the supervisor to the engine model: a socket in a folder that only their user may enter.

A stub process is not the supervisor's own child, and Triton forwards no signal to it. One JSON object a line each way.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Command = Mapping[str, Any]
_TIMEOUT_S = 5.0
_MAX_LINE_BYTES = 64 * 1024


class ControlServer:
    """Answers commands in a thread of its own until `close`."""

    def __init__(self, path: Path, obey: Callable[[Command], Mapping[str, Any]]) -> None:
        """`obey` is called with each command, one at a time. Raises OSError when the socket cannot be made."""
        self._obey = obey
        self._path = path
        path.unlink(missing_ok=True)  # of a process that was killed
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection, connection.makefile("rwb") as stream:
                try:
                    connection.settimeout(_TIMEOUT_S)
                    answer = self._obey(json.loads(stream.readline(_MAX_LINE_BYTES)))
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()
                except Exception:
                    logger.exception("a command of the supervisor failed")


def send_command(path: Path, command: Command) -> dict[str, Any]:
    """The answer of the process that listens at `path`. Raises OSError when there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        with connection.makefile("rwb") as stream:
            stream.write(json.dumps(command).encode() + b"\n")
            stream.flush()
            line = stream.readline(_MAX_LINE_BYTES)
    if not line:
        raise ConnectionError(f"{path}: the command was not answered")
    answer: dict[str, Any] = json.loads(line)
    return answer
