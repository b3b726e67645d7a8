"""How busy this machine is with other work, seen while something is measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4, 8, 9)  # columns of a line of /proc/stat: idle, iowait, and guests, which user time holds already
TOLERATED = 0.25  # share of the measured threads' cores that other work may take


@dataclass(frozen=True, slots=True)
class Load:
    """Over the time of a measurement."""

    others_cores: float  # that other processes, or other machines on the same host, kept busy on average
    load_average: float  # of the last minute, this process included

    def is_busy(self, num_threads: int) -> bool:
        """Whether other work took cores from `num_threads` threads that want one each."""
        free = max((os.cpu_count() or 1) - num_threads, 0)
        return self.others_cores > free + TOLERATED * num_threads


class LoadWatch:
    """From its making to `read`."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.monotonic(), _busy_s(), time.process_time()

    def read(self) -> Load:
        seconds = max(time.monotonic() - self._started, 1e-3)
        others = (_busy_s() - self._busy) - (time.process_time() - self._own)
        return Load(round(max(others, 0.0) / seconds, 2), round(os.getloadavg()[0], 2))


def _busy_s() -> float:
    """Seconds that all cores together were busy since the start of the machine; 0 where nobody tells."""
    try:
        columns = [int(each) for each in _STAT.read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return 0.0
    return sum(value for at, value in enumerate(columns) if at not in _IDLE) / os.sysconf("SC_CLK_TCK")
