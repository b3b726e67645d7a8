"""`dspark-trt serve`: one build behind one tritonserver, until it is asked to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.engines.open import check_device
from dspark_trt.errors import EngineBuildError
from dspark_trt.server.options import ServeOptions
from dspark_trt.server.supervisor import TritonServer

__all__ = ["ServeOptions", "TritonServer", "serve"]

_DEATH_POLL_S = 0.5


def serve(
    build_dir: Path, options: ServeOptions, on_ready: Callable[[TritonServer], None] = lambda server: None
) -> None:
    """Serve until SIGINT or SIGTERM, then stop cleanly. `on_ready` is called once a real request has been answered.

    Raises RecipeError for an unknown scheduler or a port in use, ManifestError when `build_dir` is no finished build,
    EnvironmentMissingError when its engines are for another machine or there is no server to start, EngineBuildError
    when it does not come up or ends by itself.
    """
    if options.scheduler is not None:
        parse_scheduler(options.scheduler)
    check_device(build_dir)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have started this process with SIGINT ignored
        signal.signal(number, _interrupt_once)
    try:
        with TritonServer(build_dir, options) as server:
            on_ready(server)
            while not server.has_died():
                time.sleep(_DEATH_POLL_S)
            raise EngineBuildError(server.describe_death())
    except KeyboardInterrupt:
        return


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """The first signal begins the clean-up, and none that follows may end it."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt
