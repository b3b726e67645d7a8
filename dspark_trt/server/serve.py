"""`dspark-trt serve`: one build behind one tritonserver, kept alive until it is asked to stop."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.engines.open import check_device
from dspark_trt.errors import EngineBuildError
from dspark_trt.server.exposure import confine
from dspark_trt.server.openai.process import FrontEndProcess, check_front_end, start_front_end
from dspark_trt.server.openai.settings import FrontEndOptions
from dspark_trt.server.options import Restarts, ServeOptions
from dspark_trt.server.signals import stop_signals
from dspark_trt.server.supervisor import TritonServer
from dspark_trt.steptable.table import StepTable

__all__ = ["ServeOptions", "TritonServer", "serve"]

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.2


def serve(
    build_dir: Path,
    options: ServeOptions,
    on_ready: Callable[[TritonServer], None] = lambda server: None,
    on_event: Callable[[str], None] = lambda message: None,
    front_end: FrontEndOptions | None = None,
    step_table: StepTable | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then drain and stop; a second one stops at once.

    `on_ready` is called once a real request has been answered, `on_event` with what a person has to know meanwhile: a
    server that failed and is started again, a stop. `front_end`: where OpenAI's API is answered.
    `step_table`: to price steps by, in place of the build's own (see `step_table_for`). Raises RecipeError for
    an unknown scheduler, a port in use or an address that must not be served, ManifestError when `build_dir` is no
    finished build, EnvironmentMissingError when its engines are for another machine or there is no server to start,
    EngineBuildError when it does not come up, or fails again and again.
    """
    if options.scheduler is not None:
        parse_scheduler(options.scheduler)
    check_device(build_dir)
    options, front_end = confine(options, front_end)
    if front_end is not None:
        check_front_end(build_dir, front_end)
    is_impatient = threading.Event()
    _begin_the_end_at_a_signal(is_impatient)
    try:
        with (
            TritonServer(build_dir, options, step_table) as server,
            _front_end_of(server, build_dir, front_end) as running,
        ):
            try:
                if running is not None:
                    on_event(f"OpenAI API: {running.url}/v1 (model {running.model_name}), live page: {running.url}/")
                on_ready(server)
                keep_alive(server, on_event, running)
            except KeyboardInterrupt:
                on_event(f"stopping: running requests have {options.drain_s:g} s; another signal stops at once")
                _drain(server, is_impatient)
    except KeyboardInterrupt:  # while it started
        return


@contextlib.contextmanager
def _front_end_of(
    server: TritonServer, build_dir: Path, options: FrontEndOptions | None
) -> Iterator[FrontEndProcess | None]:
    if options is None:
        yield None
        return
    with start_front_end(
        build_dir,
        options,
        grpc_address=server.grpc_address,
        metrics_url=server.metrics_url,
        default_timeout_s=server.options.admission.default_timeout_s,
    ) as running:
        yield running


def keep_alive(server: TritonServer, on_event: Callable[[str], None], front_end: FrontEndProcess | None = None) -> None:
    """Watch a server that answers, and start it, or its front end, again when it fails.

    Raises EngineBuildError when that does not help. Otherwise only an exception ends it, such as KeyboardInterrupt.
    """
    policy = server.options.restarts
    restarts, front_end_restarts = Restarts(policy), Restarts(policy)
    while True:
        time.sleep(_CHECK_INTERVAL_S)
        if front_end is not None and (reason := front_end.fault()) is not None:
            if front_end_restarts.next_pause_s() is None:
                times = policy.max_restarts + 1
                raise EngineBuildError(f"the front end failed {times} times and is given up; the last time: {reason}")
            on_event(f"the front end failed and is started again: {reason}")
            with contextlib.suppress(EngineBuildError):  # seen in the next round
                front_end.restart()
        reason = server.fault()
        while reason is not None:
            server.kill()  # first: whoever waits for an answer gets an error now
            pause_s = restarts.next_pause_s()
            if pause_s is None:
                raise EngineBuildError(
                    f"the server failed {policy.max_restarts + 1} times and is given up; the last time: {reason}; "
                    f"{server.log_tail()}"
                )
            on_event(
                f"the server failed: {reason}; it is started again in {pause_s:g} s "
                f"({restarts.num_counted} of {policy.max_restarts})"
            )
            time.sleep(pause_s)
            try:
                server.start()
                on_event("the server answers again")
                reason = None
            except (EngineBuildError, OSError) as error:  # the latter: no memory, descriptors or disk for a process
                reason = str(error)


def _drain(server: TritonServer, is_impatient: threading.Event) -> None:
    server.drain(is_impatient.is_set)
    for number in stop_signals():  # for good: this process is about to end, and shall end with its own exit code
        signal.signal(number, signal.SIG_IGN)
    server.kill()


def _begin_the_end_at_a_signal(is_impatient: threading.Event) -> None:
    """The first signal raises KeyboardInterrupt; those that follow set `is_impatient`, and interrupt no clean-up."""

    def begin(number: int, frame: FrameType | None) -> None:
        for ending in stop_signals():
            signal.signal(ending, lambda *_: is_impatient.set())
        raise KeyboardInterrupt

    for number in stop_signals():
        signal.signal(number, begin)
