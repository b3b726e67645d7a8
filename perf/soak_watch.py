"""What a server and its processes hold while it is loaded: memory, descriptors, threads, shared memory; and growth."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.server.processes import SHARED_MEMORY

MAX_GROWTH = 0.05  # of the resident memory of a kind of process, from the second quarter of a time to its last one
MAX_GROWTH_BYTES = 16 * 2**20  # what allocators and caches still take in a short time
MAX_MORE_AT_REST = 8  # descriptors or threads, for each process
_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes of one kind together."""

    num_processes: int = 0
    rss_bytes: int = 0
    num_descriptors: int = 0
    num_threads: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    at: float  # seconds of the monotonic clock
    usage: dict[str, Usage]  # by the kind of process
    shared_memory_bytes: int
    num_shared_memory_regions: int
    num_running: float | None  # requests in rows; None while the server does not answer


class ProcessTree:
    """The processes below `serve`, read from /proc."""

    def __init__(self, serve_pid: int) -> None:
        self._root = serve_pid

    def processes(self) -> dict[int, str]:
        """Kind of process by its id."""
        children: dict[int, list[int]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int(folder.joinpath("stat").read_text().rpartition(") ")[2].split()[1])
            except OSError:  # it ended meanwhile
                continue
            children.setdefault(parent, []).append(int(folder.name))
        found, todo = {self._root: "serve"}, [self._root]
        while todo:
            for pid in children.get(todo.pop(), ()):
                todo.append(pid)
                if kind := _kind(_command_line(pid)):
                    found[pid] = kind
        return found

    def sample(self, num_running: float | None = None) -> Sample:
        usage: dict[str, Usage] = {}
        prefixes = set()
        for pid, kind in self.processes().items():
            if (own := _usage(pid)) is not None:
                before = usage.get(kind, Usage())
                usage[kind] = Usage(
                    before.num_processes + 1,
                    before.rss_bytes + own.rss_bytes,
                    before.num_descriptors + own.num_descriptors,
                    before.num_threads + own.num_threads,
                )
            if match := re.search(r"shm-region-prefix-name=(\S+)", _command_line(pid)):
                prefixes.add(match[1])
        regions = [path.stat().st_size for prefix in prefixes for path in SHARED_MEMORY.glob(f"{prefix}*")]
        return Sample(time.monotonic(), usage, sum(regions), len(regions), num_running)


def _kind(command: str) -> str | None:
    if "triton_python_backend_stub" in command:
        model = re.search(r"/([^/ ]+)/1/model\.py", command)
        return f"model {model[1]}" if model else None
    if "--model-repository" in command:
        return "tritonserver"
    return "front end" if "dspark_trt.server.openai" in command else None


def _usage(pid: int) -> Usage | None:
    folder = Path("/proc") / str(pid)
    try:
        status = folder.joinpath("status").read_text()
        descriptors = len(list(folder.joinpath("fd").iterdir()))
    except OSError:
        return None
    values = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    return Usage(1, 1024 * int(values.get("VmRSS", 0)), descriptors, int(values.get("Threads", 0)))


def _command_line(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class Watch(threading.Thread):
    """A sample a second until `end`."""

    def __init__(self, tree: ProcessTree, num_running: Callable[[], float | None]) -> None:
        super().__init__(daemon=True)
        self._tree, self._num_running = tree, num_running
        self._is_over = threading.Event()
        self.samples: list[Sample] = []

    def run(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            self.samples.append(self._tree.sample(self._num_running()))

    def end(self) -> None:
        self._is_over.set()
        self.join()


@dataclass(frozen=True, slots=True)
class Growth:
    what: str
    before: float
    after: float
    is_acceptable: bool


def memory_growth(samples: Sequence[Sample], fresh_bytes: Mapping[str, float] | None = None) -> list[Growth]:
    """Medians of the second and of the last quarter of a time in which no process was replaced.

    `fresh_bytes`: what a kind of process may take for the first time in that.
    """
    quarter = max(len(samples) // 4, 1)
    early, late = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    found = []
    for kind in sorted(late[-1].usage):
        before, after = (
            statistics.median(sample.usage[kind].rss_bytes if kind in sample.usage else 0 for sample in part)
            for part in (early, late)
        )
        found.append(_growth(f"resident memory, {kind}", before, after, (fresh_bytes or {}).get(kind, 0.0)))
    sizes = [statistics.median(sample.shared_memory_bytes for sample in part) for part in (early, late)]
    return [*found, _growth("shared memory", *sizes)]


def _growth(what: str, before: float, after: float, num_fresh_bytes: float = 0.0) -> Growth:
    allowed = max(MAX_GROWTH * before, MAX_GROWTH_BYTES) + num_fresh_bytes
    return Growth(what, before, after, after <= before + allowed)


def growth_at_rest(before: Sample, after: Sample) -> list[Growth]:
    """What stays behind without load: descriptors, threads, processes, regions of shared memory."""
    found = []
    for kind in sorted(before.usage.keys() | after.usage.keys()):
        old, new = before.usage.get(kind, Usage()), after.usage.get(kind, Usage())
        allowed = MAX_MORE_AT_REST * max(old.num_processes, 1)
        for what, least, most, more in (
            ("processes", old.num_processes, new.num_processes, 0),
            ("descriptors", old.num_descriptors, new.num_descriptors, allowed),
            ("threads", old.num_threads, new.num_threads, allowed),
        ):
            found.append(Growth(f"{what}, {kind}", least, most, most <= least + more))
    regions = (before.num_shared_memory_regions, after.num_shared_memory_regions)
    return [*found, Growth("shared memory regions", *regions, regions[1] <= regions[0])]
