"""Processes of a server that are not our own children: who belongs to it, who still runs, how all are ended."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# Servers with the fix for CVE-2025-23319 let no client register a region whose name begins so.
_PREFIX = "triton_python_backend_shm_region_dspark"
STUB = b"triton_python_backend_stub"
_POLL_S = 0.05
_LEFTOVERS_TIMEOUT_S = 5.0


def state_and_group(pid: int) -> tuple[str, int] | None:
    """The state letter and the process group; None when there is no such process."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:3]
    except OSError:
        return None
    return state, int(group)


def is_running(pid: int) -> bool:
    """Ended ones that nobody reaps, as in many containers, do not count."""
    found = state_and_group(pid)
    return found is not None and found[0] not in "ZX"


def running_in_group(group: int) -> list[int]:
    """The processes of a group that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if (known := state_and_group(pid)) is not None and known[1] == group and known[0] not in "ZX":
            found.append(pid)
    return found


def stubs_of_group(group: int) -> list[int]:
    """The processes that run the Python models of a server."""
    return [pid for pid in running_in_group(group) if STUB in command_line(pid)]


def mentioned_in(text: str) -> list[int]:
    """The processes whose command line has `text`, this one left out."""
    wanted = text.encode()
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if pid != os.getpid() and wanted in command_line(pid) and is_running(pid)]


def kill_all_that_mention(text: str, *, timeout_s: float) -> None:
    """End every process whose command line has `text`, those among them that are started meanwhile, too."""
    deadline = time.monotonic() + timeout_s
    while (pids := mentioned_in(text)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def new_prefix() -> str:
    """A prefix for the shared memory of one server: no other has it, and it tells whose server it is."""
    return f"{_PREFIX}_{_pid_namespace()}_{os.getpid()}_{secrets.token_hex(4)}_"


def end_leftovers() -> None:
    """End what servers left whose supervisor was killed together with its watchdog.

    Shared memory can be shared between containers that cannot see each other's processes: only what was started in our
    own namespace of process ids is looked at.
    """
    owned = re.compile(rf"{_PREFIX}_{_pid_namespace()}_(\d+)_[0-9a-f]+_")
    found = {match[0]: int(match[1]) for path in SHARED_MEMORY.iterdir() if (match := owned.match(path.name))}
    for prefix, pid in found.items():
        if not is_running(pid):
            kill_all_that_mention(prefix, timeout_s=_LEFTOVERS_TIMEOUT_S)
            remove_shared_memory(prefix)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def remove_shared_memory(prefix: str) -> None:
    for leftover in SHARED_MEMORY.glob(f"{prefix}*"):
        leftover.unlink(missing_ok=True)


def command_line(pid: int) -> bytes:
    """Its arguments, each ended by a zero; nothing where there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return b""
