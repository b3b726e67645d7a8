"""How a build is served: addresses, scheduler, times."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How one build is served. A port of 0 takes any free one."""

    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    address: str = "127.0.0.1"  # that all three bind to
    scheduler: str | None = None  # as in `parse_scheduler`; None: what the build's repository says
    cache: Path | None = None  # where the server tree lives; None: default_cache_folder()
    log_file: Path | None = None  # None: the server writes to this process's standard error
    startup_timeout_s: float = 300.0


def with_ports(options: ServeOptions) -> ServeOptions:
    """Replace each port of 0 by a free one; all are held until all are chosen, so that they differ."""
    with contextlib.ExitStack() as stack:

        def choose(port: int) -> int:
            if port != 0:
                return port
            listener = stack.enter_context(socket.socket())
            listener.bind((options.address, 0))
            chosen: int = listener.getsockname()[1]
            return chosen

        return replace(
            options,
            http_port=choose(options.http_port),
            grpc_port=choose(options.grpc_port),
            metrics_port=choose(options.metrics_port),
        )
