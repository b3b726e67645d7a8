"""Runs one tritonserver: start, wait for a real answer, look after it, stop without leaving anything behind.

Facts that shape this module: a server whose backend process died still answers "ready", or aborts, and starts no other
one; so its processes are watched, and a probe asks the thread that decodes. After an abort the backend processes live
on without their server and keep its shared memory, so the server gets a session of its own, and all of it is ended
together; shared memory carries a prefix per server, so that only its own is removed. A watchdog does the same where
this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from dspark_trt.errors import EngineBuildError
from dspark_trt.machine.address import in_url
from dspark_trt.server.arguments import EXIT_MARGIN_S, server_arguments
from dspark_trt.server.http_calls import generate, is_ready, probe
from dspark_trt.server.options import ServeOptions, with_ports
from dspark_trt.server.prober import Prober
from dspark_trt.server.processes import (
    end_leftovers,
    is_running,
    new_prefix,
    remove_shared_memory,
    running_in_group,
    stubs_of_group,
)
from dspark_trt.server.run_folder import RunFolder
from dspark_trt.server.server_log import ServerLog
from dspark_trt.server.server_tree import find_server
from dspark_trt.server.signals import signals_deferred, signals_ignored
from dspark_trt.server.start_watch import FirstAnswer, StartWatch
from dspark_trt.serving.control import send_command
from dspark_trt.steptable.table import StepTable

__all__ = ["TritonServer", "generate"]

_ORPHAN_TIMEOUT_S = 2  # for killed processes to be gone
_FIRST_ANSWER_TIMEOUT_S = 60
_POLL_S = 0.05
_NUM_TAIL_LINES = 30
_ROUTINE = re.compile(r"I\d{4} |\+-|\| |$")  # informational messages, tables, empty lines


class TritonServer:
    """Context manager around one tritonserver that serves one build.

    `with TritonServer(build_dir, options) as server:` gives a server whose `ensemble` has answered a request. Leaving
    the block ends every process of the server and removes its shared memory. The build itself is never written to.
    """

    def __init__(self, build_dir: Path, options: ServeOptions, step_table: StepTable | None = None) -> None:
        """`step_table`: to price steps by, in place of the build's own."""
        self._build_dir, self._step_table = build_dir, step_table
        self._options = with_ports(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._stubs: list[int] = []
        self._prober: Prober | None = None
        self._folder: RunFolder | None = None
        self._log = ServerLog(self._options.log_file, self._options.log_format, is_quiet=not self._options.logs_routine)
        self._admin_key = secrets.token_hex(16)
        self._shared_memory_prefix = new_prefix()

    @property
    def options(self) -> ServeOptions:
        """The options in force, with the ports that were chosen."""
        return self._options

    @property
    def http_url(self) -> str:
        return f"http://{_host_of(self._options.address)}:{self._options.http_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{_host_of(self._options.metrics_address)}:{self._options.metrics_port}/metrics"

    @property
    def grpc_address(self) -> str:
        return f"{_host_of(self._options.address)}:{self._options.grpc_port}"

    def __enter__(self) -> TritonServer:
        """Start the server and wait for its first answer.

        Raises ManifestError when the build has no model repository, EnvironmentMissingError when there is no server to
        start, EngineBuildError with the log's tail when it dies or does not answer in time.
        """
        try:
            end_leftovers()
            self._folder = RunFolder(self._build_dir, self._options, self._shared_memory_prefix, self._step_table)
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server's process, the first or one after `kill`, and wait for its first answer.

        Raises as `__enter__`.
        """
        assert self._process is None, "the one before it is ended first"
        tree = find_server()
        assert self._folder is not None, "prepared first"
        arguments = server_arguments(self._options, self._admin_key, self._shared_memory_prefix)
        command = [str(tree.executable), f"--model-repository={self._folder.repository}", *arguments]
        if tree.backend_directory is not None:
            command += [f"--backend-directory={tree.backend_directory}"]
        output = self._log.open()
        try:
            with signals_deferred():  # a process that was started must be known
                self._process = subprocess.Popen(
                    command,
                    env=tree.environment(),
                    cwd=tree.working_directory or self._folder.empty,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        finally:
            self._log.opened()
        self._wait_until_answering()
        self._stubs = stubs_of_group(self._process.pid)
        timeout_s = self._options.probe_timeout_s
        ask = partial(probe, self.http_url, timeout_s=timeout_s)
        self._prober = Prober(ask, self._options.probe_interval_s, timeout_s)

    def fault(self) -> str | None:
        """Why the server can no longer serve; None while it can. Cheap: to be asked several times a second."""
        if self._process is None:
            return "it was ended"
        if self.has_died():
            return "its process ended by itself"
        if dead := [pid for pid in self._stubs if not is_running(pid)]:
            return f"{len(dead)} of its {len(self._stubs)} model processes ended (process {dead[0]})"
        assert self._prober is not None, "a server that was started is probed"
        return self._prober.fault()

    def has_died(self) -> bool:
        """Whether the server process has ended; it is not reaped, so that its process group stays ours."""
        assert self._process is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def drain(self, is_impatient: Callable[[], bool] = lambda: False) -> None:
        """Take no more requests, give those that run `drain_s`, end the others with an error, end the server.

        Returns at the latest a few seconds after that; as soon as `is_impatient`.
        """
        if self._process is None or self._folder is None or self.has_died():
            return
        seconds = self._options.drain_s
        with contextlib.suppress(OSError):  # no engine model is left that could be told
            send_command(self._folder.control_socket, {"command": "drain", "seconds": seconds})
        os.kill(self._process.pid, signal.SIGINT)  # it refuses connections from now on, and waits for running requests
        deadline = time.monotonic() + seconds + EXIT_MARGIN_S
        while not (self.has_died() or is_impatient()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End every process of the server at once: its clients see that their connections end."""
        with signals_deferred():
            if self._prober is not None:
                self._prober.close()
                self._prober = None
            if self._process is not None:
                self._end(self._process)
                self._process = None

    def stop(self) -> None:
        """End the server and all that was made for it, at once; for running requests `drain` comes first. Safe to call
        twice."""
        with signals_ignored():
            self.kill()
            if self._folder is not None:
                self._folder.close()
                self._folder = None

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGKILL)  # backend processes are in the server's group, which is not reaped yet
        process.wait()
        deadline = time.monotonic() + _ORPHAN_TIMEOUT_S
        while running_in_group(process.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        remove_shared_memory(self._shared_memory_prefix)

    def describe_death(self) -> str:
        """What a person needs to know about a server that ended by itself."""
        return f"tritonserver serving {self._build_dir} ended by itself; {self.log_tail()}"

    def _wait_until_answering(self) -> None:
        assert self._process is not None, "started before"
        watch, deadline = StartWatch(self._process.pid), time.monotonic() + self._options.startup_timeout_s
        while not is_ready(self.http_url):
            self._check_start(watch)
            if time.monotonic() > deadline:
                waited = f"{self._options.startup_timeout_s:g} s"
                raise EngineBuildError(
                    f"tritonserver serving {self._build_dir} is not ready after {waited}; {self.log_tail()}"
                )
            time.sleep(_POLL_S)
        first = FirstAnswer(self.http_url, _FIRST_ANSWER_TIMEOUT_S)
        while first.is_awaited():
            self._check_start(watch)
        if first.error is not None:
            raise EngineBuildError(
                f"tritonserver serving {self._build_dir} is ready but does not answer: {first.error}; {self.log_tail()}"
            )

    def _check_start(self, watch: StartWatch) -> None:
        """Raises EngineBuildError when the server will not come up any more."""
        if self.has_died():
            raise EngineBuildError(self.describe_death())
        if (fault := watch.fault()) is not None:
            raise EngineBuildError(f"tritonserver serving {self._build_dir} does not start: {fault}; {self.log_tail()}")

    def log_tail(self) -> str:
        log_file = self._options.log_file
        if log_file is None:
            return "its messages are above"
        lines = [line for line in log_file.read_text(errors="replace").splitlines() if not _ROUTINE.match(line)]
        return f"the end of its log {log_file}, routine lines left out:\n" + "\n".join(lines[-_NUM_TAIL_LINES:])


def _host_of(address: str) -> str:
    """Where this machine reaches what binds to an address, as it stands in a URL."""
    return in_url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address))
