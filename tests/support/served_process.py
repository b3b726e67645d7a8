"""`serve` as a process of its own, as people run it: to be killed, signalled, and looked at from outside."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_trt.server.processes import SHARED_MEMORY, is_running, mentioned_in

_SCRIPT = """\
import json, sys
from pathlib import Path
from dspark_trt.errors import DSparkError
from dspark_trt.server.options import RestartPolicy, ServeOptions
from dspark_trt.server.serve import serve
from dspark_trt.serving.limits import AdmissionLimits

options = json.loads(sys.argv[2])
options["admission"] = AdmissionLimits(**options.get("admission", {}))
options["restarts"] = RestartPolicy(**options.get("restarts", {}))
options["log_file"] = Path(options["log_file"])

def on_ready(server):
    ready = dict(http=server.http_url, grpc=server.grpc_address, metrics=server.metrics_url,
                 server=server._process.pid, prefix=server._shared_memory_prefix, folder=str(server._folder.path))
    print(json.dumps(ready), flush=True)

try:
    serve(Path(sys.argv[1]), ServeOptions(0, 0, 0, **options), on_ready, lambda message: print(message, flush=True))
except DSparkError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


@dataclass
class Served:
    process: subprocess.Popen[str]
    http_url: str
    grpc_address: str
    metrics_url: str
    server_pid: int  # of the first tritonserver
    prefix: str  # of its shared memory, and in the command line of every process of it
    folder: Path

    def processes(self) -> list[int]:
        """Every process of the server, its watchdog among them."""
        return mentioned_in(self.prefix)

    def stubs(self, model: str) -> list[int]:
        """The processes that run a model."""
        wanted = f"/repository/{model}/1/model.py"
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in self.processes()}
        return [pid for pid, command in commands.items() if wanted in command]

    def shared_memory(self) -> list[Path]:
        return list(SHARED_MEMORY.glob(f"{self.prefix}*"))

    def read_event(self) -> str:
        """The next line that `serve` printed."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def assert_nothing_is_left(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while self.processes() or self.shared_memory() or self.folder.exists():
            found = f"{self.processes()}, {self.shared_memory()}, folder {self.folder.exists()}"
            assert time.monotonic() < deadline, f"left behind: {found}"
            time.sleep(0.05)
        assert not is_running(self.server_pid)


@contextmanager
def served(build_dir: Path, log_file: Path, **options: Any) -> Iterator[Served]:
    """`serve` of a build, from its first answer on; whatever the test did to it, nothing of it is left at the end."""
    arguments = [str(build_dir), json.dumps({"log_file": str(log_file), **options})]
    process = subprocess.Popen([sys.executable, "-c", _SCRIPT, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    try:
        ready = json.loads(first)
    except ValueError:
        process.kill()
        raise AssertionError(f"serve did not come up: {first} {process.stdout.read()}") from None
    found = Served(
        process, ready["http"], ready["grpc"], ready["metrics"], ready["server"], ready["prefix"], Path(ready["folder"])
    )
    try:
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        process.stdout.close()
        found.assert_nothing_is_left(within_s=10)
