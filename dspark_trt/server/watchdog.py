"""Ends a server whose supervisor is gone, however it went: a process that waits for its standard input to end.

    python -I watchdog.py PREFIX FOLDER

PREFIX is that of the server's shared memory, which the command lines of the server and of its stubs have, and which no
other server has; FOLDER is what the supervisor keeps for it. A line on standard input says that there is nothing left
to do. Kept free of this package, so that it starts in no time and outlives an upgrade.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

_TIMEOUT_S = 30.0


def main() -> None:
    prefix, folder = sys.argv[1:3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the supervisor
    if sys.stdin.readline():
        return
    deadline = time.monotonic() + _TIMEOUT_S
    while (pids := _pids(prefix.encode())) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for leftover in Path("/dev/shm").glob(f"{prefix}*"):
        leftover.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _pids(wanted: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            is_dead = (folder / "stat").read_text().rpartition(") ")[2][0] in "ZX"
            if not is_dead and int(folder.name) != os.getpid() and wanted in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    main()
