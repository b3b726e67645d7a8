"""Runs one tritonserver process: start, wait until a real request succeeds, stop without leaving anything behind.

Facts that shape this module: a server whose backend process died still answers "ready", so only a request counts;
after an abort the backend processes live on without their server and keep its shared memory, so the server gets a
session of its own, and all of it is ended together; shared memory carries a prefix per server, so that only its own is
removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import HTTPError

from dspark_trt.errors import EngineBuildError
from dspark_trt.packaging.model_repo import overlay_model_repo
from dspark_trt.server.options import ServeOptions, with_ports
from dspark_trt.server.server_tree import find_server

_EXIT_TIMEOUT_S = 5  # given to running requests by the server itself
_KILL_TIMEOUT_S = 10  # after which a server that does not stop is killed
_ORPHAN_TIMEOUT_S = 2  # for killed processes to be gone
_FIRST_ANSWER_TIMEOUT_S = 60
_POLL_S = 0.05
_SHARED_MEMORY = Path("/dev/shm")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our own server is behind no proxy
_ROUTINE = re.compile(r"I\d{4} |\+-|\| |$")  # informational messages, tables, empty lines


class TritonServer:
    """Context manager around one tritonserver that serves one build.

    `with TritonServer(build_dir, options) as server:` gives a server whose `ensemble` has answered a request. Leaving
    the block ends every process of the server and removes its shared memory. The build itself is never written to.
    """

    def __init__(self, build_dir: Path, options: ServeOptions) -> None:
        self._build_dir = build_dir
        self._options = with_ports(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._resources = contextlib.ExitStack()
        self._shared_memory_prefix = f"dspark_{os.getpid()}_{secrets.token_hex(4)}_"

    @property
    def options(self) -> ServeOptions:
        """The options in force, with the ports that were chosen."""
        return self._options

    @property
    def http_url(self) -> str:
        return f"http://{self._connect_host()}:{self._options.http_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._connect_host()}:{self._options.metrics_port}/metrics"

    @property
    def grpc_address(self) -> str:
        return f"{self._connect_host()}:{self._options.grpc_port}"

    def _connect_host(self) -> str:
        return "127.0.0.1" if self._options.address == "0.0.0.0" else self._options.address

    def __enter__(self) -> TritonServer:
        """Start the server and wait for its first answer.

        Raises ManifestError when the build has no model repository, EnvironmentMissingError when there is no server to
        start, EngineBuildError with the log's tail when it dies or does not answer in time.
        """
        try:
            self._process = self._start()
            self._wait_until_answering()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> subprocess.Popen[bytes]:
        tree = find_server(self._options.cache)
        repository = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="dspark-trt-")))
        overlay_model_repo(self._build_dir, repository, scheduler=self._options.scheduler)
        command = [str(tree.executable), f"--model-repository={repository}", *self._arguments()]
        if tree.backend_directory is not None:
            command += [f"--backend-directory={tree.backend_directory}"]
        log_file = self._options.log_file
        log = log_file and self._resources.enter_context(log_file.open("wb"))
        return subprocess.Popen(
            command,
            env=tree.environment(),
            cwd=tree.working_directory,
            stdin=subprocess.DEVNULL,
            stdout=log or None,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def has_died(self) -> bool:
        """Whether the server process has ended; it is not reaped, so that its process group stays ours."""
        assert self._process is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def stop(self) -> None:
        """Ask the server to stop, end what is left of its session, and remove its shared memory. Safe to call twice."""
        with _signals_ignored():
            if self._process is not None:
                self._end(self._process)
                self._process = None
            self._resources.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        os.kill(process.pid, signal.SIGINT)  # the process is not reaped yet, so the number is still its own
        while not self.has_died() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        os.killpg(process.pid, signal.SIGKILL)  # the backend processes are in the server's group
        process.wait()
        while _has_running_process(process.pid) and time.monotonic() < deadline + _ORPHAN_TIMEOUT_S:
            time.sleep(_POLL_S)
        for leftover in _SHARED_MEMORY.glob(f"{self._shared_memory_prefix}*"):
            leftover.unlink(missing_ok=True)

    def describe_death(self) -> str:
        """What a person needs to know about a server that ended by itself."""
        return f"tritonserver serving {self._build_dir} ended by itself; {self._log_tail()}"

    def _arguments(self) -> Iterator[str]:
        options = self._options
        for service, port in (
            ("http", options.http_port),
            ("grpc", options.grpc_port),
            ("metrics", options.metrics_port),
        ):
            yield f"--{service}-address={options.address}"
            yield f"--{service}-port={port}"
        yield f"--exit-timeout-secs={_EXIT_TIMEOUT_S}"
        yield "--allow-gpu-metrics=false"
        yield "--pinned-memory-pool-byte-size=0"  # all tensors live in host memory
        yield f"--backend-config=python,shm-region-prefix-name={self._shared_memory_prefix}"
        yield f"--backend-config=python,stub-timeout-seconds={int(options.startup_timeout_s)}"

    def _wait_until_answering(self) -> None:
        deadline = time.monotonic() + self._options.startup_timeout_s
        while not self._is_ready():
            if self.has_died():
                raise EngineBuildError(self.describe_death())
            if time.monotonic() > deadline:
                waited = f"{self._options.startup_timeout_s:g} s"
                raise EngineBuildError(
                    f"tritonserver serving {self._build_dir} is not ready after {waited}; {self._log_tail()}"
                )
            time.sleep(_POLL_S)
        try:
            generate(self.http_url, {"text_input": "Hello", "max_tokens": 1}, timeout_s=_FIRST_ANSWER_TIMEOUT_S)
        except OSError as error:
            reason = error.read().decode(errors="replace") if isinstance(error, HTTPError) else str(error)
            raise EngineBuildError(
                f"tritonserver serving {self._build_dir} is ready but does not answer: {reason}; {self._log_tail()}"
            ) from error

    def _is_ready(self) -> bool:
        try:
            with _DIRECT.open(f"{self.http_url}/v2/health/ready", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except OSError:  # not listening yet, or still loading
            return False

    def _log_tail(self, num_lines: int = 30) -> str:
        log_file = self._options.log_file
        if log_file is None:
            return "its messages are above"
        lines = [line for line in log_file.read_text(errors="replace").splitlines() if not _ROUTINE.match(line)]
        return f"the end of its log {log_file}, routine lines left out:\n" + "\n".join(lines[-num_lines:])


def _has_running_process(group: int) -> bool:
    """Whether a process of the group still runs. Ended ones that nobody reaps, as in many containers, do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, process_group = stat.read_text().rpartition(") ")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                return True
    return False


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """An impatient second signal must not interrupt the clean-up, which is bounded in time.

    Blocking signals in this thread would not do: any other thread takes them, and Python then runs the handler here.
    """
    if threading.current_thread() is not threading.main_thread():  # no handler runs in this thread
        yield
        return
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def generate(http_url: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """One request to the ensemble through the generate endpoint.

    Raises OSError (HTTPError with the server's message among them).
    """
    body = json.dumps(request).encode()
    call = urllib.request.Request(f"{http_url}/v2/models/ensemble/generate", body, {"Content-Type": "application/json"})
    with _DIRECT.open(call, timeout=timeout_s) as answer:
        decoded: dict[str, Any] = json.load(answer)
    return decoded
