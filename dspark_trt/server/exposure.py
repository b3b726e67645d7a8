"""Which of our doors other machines may use.

Releases of Triton before 2.59.1 (25.07) end with a fault of memory after one hostile HTTP request. No option prevents
it, and the server that PyPI has is 2.51. So an older server listens to this machine alone whatever `--address` says,
and the only way in from outside is our own front end, which parses everything itself.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

from dspark_trt.errors import EnvironmentMissingError, RecipeError
from dspark_trt.server.openai.settings import FrontEndOptions
from dspark_trt.server.options import ServeOptions, with_ports
from dspark_trt.server.server_tree import ServerTree, find_server

FIXED_VERSION = (2, 59, 1)
BUNDLED_VERSION = "2.51.0"  # inside nvidia-pytriton 0.7.0
LOOPBACK = "127.0.0.1"
FIXED = ".".join(map(str, FIXED_VERSION))
_START_TIMEOUT_S = 120.0
_POLL_S = 0.05
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def confine(options: ServeOptions, front_end: FrontEndOptions | None) -> tuple[ServeOptions, FrontEndOptions | None]:
    """The options with the addresses that Triton and the front end really listen on.

    Raises RecipeError where other machines were to reach a server that must not be reached, and there is no front end;
    EnvironmentMissingError when there is no server.
    """
    reachable = front_end and replace(front_end, address=options.address)
    if is_loopback(options.address) and is_loopback(options.metrics_address):
        return options, reachable
    version = server_version(find_server())
    if is_fixed(version):
        return options, reachable
    if not is_loopback(options.metrics_address):
        raise RecipeError(
            f"--metrics-address {options.metrics_address}: the tritonserver here is {version}, and before {FIXED} one "
            f"hostile HTTP request ends it, so it listens on {LOOPBACK} only. Leave the option out: with --openai-port "
            f"9000 our own front end has /metrics too; or put tritonserver {FIXED} or later on PATH"
        )
    if front_end is None:
        raise RecipeError(
            f"--address {options.address}: the tritonserver here is {version}, and before {FIXED} one hostile HTTP "
            f"request ends it, so it listens on {LOOPBACK} only. Add --openai-port 9000: our own front end then "
            f"listens on {options.address} (OpenAI's API, generate and generate_stream, metrics); or put tritonserver "
            f"{FIXED} or later on PATH (Triton's containers from 25.07)"
        )
    return replace(options, address=LOOPBACK), reachable


def installed_version() -> str:
    """The version of the server that `serve` would start here; nothing is fetched. Raises as `server_version`."""
    installed = shutil.which("tritonserver")
    return BUNDLED_VERSION if installed is None else server_version(ServerTree(Path(installed)))


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_fixed(version: str) -> bool:
    """Whether a server of this version may be reached by other machines; what cannot be read as one may not."""
    numbers = version.split("-")[0].split(".")
    return all(number.isdecimal() for number in numbers) and tuple(map(int, numbers)) >= FIXED_VERSION


def server_version(tree: ServerTree) -> str:
    """The version of a server. The bundled one's is known; any other has to be started, without a model, to tell it.

    Raises EnvironmentMissingError when it does not.
    """
    if tree.backend_directory is not None:
        return BUNDLED_VERSION
    options = with_ports(ServeOptions(0, 0, 0))
    with tempfile.TemporaryDirectory(prefix="dspark-trt-") as folder:
        process = subprocess.Popen(
            [
                str(tree.executable),
                f"--model-repository={folder}",
                f"--http-address={LOOPBACK}",
                f"--http-port={options.http_port}",
                "--allow-grpc=false",
                "--allow-metrics=false",
            ],
            env=tree.environment(),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return _ask(process, f"http://{LOOPBACK}:{options.http_port}/v2", tree.executable)
        finally:
            process.kill()
            process.wait()


def _ask(process: subprocess.Popen[bytes], url: str, executable: Path) -> str:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), _DIRECT.open(url, timeout=5.0) as answer:
            return str(json.load(answer)["version"])
        time.sleep(_POLL_S)
    raise EnvironmentMissingError(
        f"{executable} does not say its version: started without a model, it does not answer; run it by hand to see why"
    )
