"""How a build is served: addresses, scheduler, admission, times."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dspark_trt.errors import RecipeError
from dspark_trt.machine.address import family_of
from dspark_trt.serving.limits import AdmissionLimits

LogFormat = Literal["text", "json"]
StepTableChoice = Literal["remeasure", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often a server that fails is started again: after a growing pause, and not for ever."""

    max_restarts: int = 5  # without a time of `healthy_s` between them; then it is given up
    healthy_s: float = 300.0
    first_pause_s: float = 0.25
    max_pause_s: float = 15.0

    def pause_s(self, num_restarts: int) -> float:
        """Before the restart of this number, 0 being the first."""
        return min(self.first_pause_s * 4.0**num_restarts, self.max_pause_s)


class Restarts:
    """Those that a policy still counts."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._at: deque[float] = deque()

    @property
    def num_counted(self) -> int:
        return len(self._at)

    def next_pause_s(self) -> float | None:
        """Seconds before the restart that is due now, which counts from here on; None: it is given up."""
        now = time.monotonic()
        while self._at and now - self._at[0] > self._policy.healthy_s:
            self._at.popleft()
        if len(self._at) == self._policy.max_restarts:
            return None
        self._at.append(now)
        return self._policy.pause_s(len(self._at) - 1)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How one build is served. A port of 0 takes any free one."""

    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    address: str = "127.0.0.1"  # that HTTP and gRPC bind to
    metrics_address: str = "127.0.0.1"
    scheduler: str | None = None  # as in `parse_scheduler`; None: what the build's repository says
    prefix_cache: bool | None = None  # whether K/V are reused between requests; None: as the build says
    log_file: Path | None = None  # None: the server writes to this process's standard error
    startup_timeout_s: float = 300.0
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    drain_s: float = 30.0  # that running requests get when the server is asked to stop
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 60.0  # without an answer to a probe the server counts as hung
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    logs_routine: bool = False  # Triton's informational messages, and ours
    log_format: LogFormat = "text"
    step_table: StepTableChoice = "remeasure"  # what `serve` does about a table of other circumstances
    step_table_budget_s: float = 60.0  # that measuring it again may take, before the server is started


def with_ports(options: ServeOptions) -> ServeOptions:
    """Replace each port of 0 by a free one; all are held until all are chosen, so that they differ.

    Raises RecipeError for a port that cannot be listened on: behind it another server may already answer, and would be
    taken for the one that is being started.
    """
    with contextlib.ExitStack() as stack:

        def choose(name: str, address: str) -> int:
            port: int = getattr(options, name)
            listener = stack.enter_context(socket.socket(family_of(address)))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that just ended do not count
            try:
                listener.bind((address, port))
                listener.listen()
            except (OSError, OverflowError) as error:
                raise RecipeError(
                    f"{name}: cannot listen on {address} port {port} ({error}); end what uses it, or choose "
                    "another port (0: any free one)"
                ) from None
            chosen: int = listener.getsockname()[1]
            return chosen

        return replace(
            options,
            http_port=choose("http_port", options.address),
            grpc_port=choose("grpc_port", options.address),
            metrics_port=choose("metrics_port", options.metrics_address),
        )
