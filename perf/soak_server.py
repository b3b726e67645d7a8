"""`dspark-trt serve` as a process of its own, as people run it, and what it says of itself meanwhile."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from soak_watch import ProcessTree

from dspark_trt.errors import EngineBuildError
from dspark_trt.server.options import ServeOptions, with_ports

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_STOP_TIMEOUT_S = 60.0
FAILED, BACK = "the server failed", "the server answers again"


class SoakServer:
    """A server with its front end. Lines of its log are kept with the time at which they came."""

    def __init__(self, process: subprocess.Popen[str], options: ServeOptions) -> None:
        self.process = process
        self.tree = ProcessTree(process.pid)
        self.grpc_address = f"127.0.0.1:{options.grpc_port}"
        self.metrics_url = f"http://127.0.0.1:{options.metrics_port}/metrics"
        self.openai_url = ""
        self.lines: list[tuple[float, str]] = []
        self._is_ready = threading.Event()
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line.rstrip()))
            if match := re.match(r"OpenAI API: (http\S+)/v1 ", line):
                self.openai_url = match[1]
            if line.startswith("ready:"):
                self._is_ready.set()

    def wait_until_ready(self, timeout_s: float = 300.0) -> None:
        """Raises EngineBuildError with what the server said."""
        deadline = time.monotonic() + timeout_s
        while not (self._is_ready.is_set() and self.openai_url):
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = "\n".join(line for _, line in self.lines[-20:])
                raise EngineBuildError(f"the server to be soaked did not come up:\n{said}")
            time.sleep(0.05)

    def events(self, beginning: str, since: float = 0.0) -> list[tuple[float, str]]:
        return [(at, line) for at, line in list(self.lines) if at >= since and line.startswith(beginning)]

    def kill_engine_stub(self) -> float:
        """Kill the process that decodes, as the kernel's killer would; returns when."""
        of_models = {kind.removeprefix("model "): pid for pid, kind in self.tree.processes().items() if "model" in kind}
        (name,) = of_models.keys() - {"preprocessing", "postprocessing"}
        at = time.monotonic()
        subprocess.run(["kill", "-KILL", str(of_models[name])], check=True)
        return at

    def metrics(self) -> dict[str, float] | None:
        """Samples of this package by name, labels left out; None while it does not answer."""
        try:
            text = self._metrics_text()
        except OSError:
            return None
        return {name: float(value) for name, value in re.findall(r"^(dspark_\w+)(?:\{[^}]*\})? (\S+)$", text, re.M)}

    def is_healthy(self) -> bool:
        """As a load balancer asks: whether a request passes through the front end and all models."""
        try:
            with _DIRECT.open(f"{self.openai_url}/health", timeout=10.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _metrics_text(self) -> str:
        with _DIRECT.open(self.metrics_url, timeout=5.0) as answer:
            text: str = answer.read().decode()
        return text

    def outcomes(self) -> dict[str, int]:
        """Requests that ended since the server came up, by outcome; none while it does not answer."""
        try:
            text = self._metrics_text()
        except OSError:
            return {}
        found = re.findall(r'^dspark_requests_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.M)
        return {outcome: int(float(count)) for outcome, count in found if float(count)}

    def num_running(self) -> float | None:
        samples = self.metrics()
        return None if samples is None else samples.get("dspark_requests_running")


@contextmanager
def soak_server(build_dir: Path, queue_time_s: float = 300.0) -> Iterator[SoakServer]:
    """A server of the build on free ports, in whose queue a request may wait so long; ended, whatever happens in the
    block."""
    options = with_ports(ServeOptions(0, 0, 0))
    ports = {name: str(getattr(options, f"{name}_port")) for name in ("http", "grpc", "metrics")}
    arguments = [part for name, port in ports.items() for part in (f"--{name}-port", port)]
    arguments += ["--openai-port", "0", "--max-queue-time", f"{queue_time_s:g}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark_trt", "serve", str(build_dir), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # an interrupt of the terminal ends the soak, which ends the server
    )
    server = SoakServer(process, options)
    try:
        server.wait_until_ready()
        yield server
    finally:
        for _ in range(2):  # the second one does not wait for requests
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
