"""`serve --openai-port`, as people run it: what other machines reach, true readiness, faults, TLS, the end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from dspark_trt.server.openai.process import start_front_end
from dspark_trt.server.openai.settings import FrontEndOptions
from dspark_trt.server.processes import mentioned_in
from tests.support.openai_clients import request, wait

pytestmark = pytest.mark.triton

BACK_WITHIN_S = 40.0  # on a loaded machine
LONG = 8000  # tokens: some ten seconds of work
KEY = "a-key-of-this-test"


@dataclass
class Served:
    process: subprocess.Popen[str]
    lines: list[str]

    def printed(self, pattern: str) -> str:
        found: list[str] = []

        def is_there() -> bool:
            found[:] = [match[1] for line in self.lines if (match := re.search(pattern, line))]
            return bool(found) or self.process.poll() is not None

        wait(is_there, 120.0)
        assert found, self.lines
        return found[0]

    @property
    def url(self) -> str:
        return "http://127.0.0.1" + self.printed(r"OpenAI API: http://0\.0\.0\.0(:\d+)/v1 \(model tiny\)")

    @property
    def triton_port(self) -> int:
        return int(self.printed(r"ready: http://127\.0\.0\.1:(\d+)"))


@pytest.fixture(scope="module")
def served(tiny_build: Path) -> Iterator[Served]:
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    command = [sys.executable, "-m", "dspark_trt", "serve", str(tiny_build), *ports]
    process = subprocess.Popen(
        [*command, "--address=0.0.0.0", "--served-model-name=tiny"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")), daemon=True).start()
    found = Served(process, lines)
    try:
        assert found.url
        assert found.triton_port
        yield found
    finally:
        if process.poll() is None:
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
        process.wait(60)


def other_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def can_connect(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def is_ready(url: str) -> bool:
    return request(url, "/health")[0] == 200


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")


def engine_stub(served: Served) -> int:
    """The process of the engine model; every process of the server has the server's prefix in its command."""
    (server,) = (pid for pid in mentioned_in("--model-repository") if parent_of(pid) == served.process.pid)
    match = re.search(r"shm-region-prefix-name=(\S+)", command_of(server))
    assert match
    (stub,) = (pid for pid in mentioned_in(match[1]) if "/repository/dspark/1/model.py" in command_of(pid))
    return stub


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def test_other_machines_reach_the_front_end_and_no_old_triton(served: Served) -> None:
    outside = other_address()
    port = int(served.url.rpartition(":")[2])
    assert can_connect("127.0.0.1", served.triton_port)
    assert not can_connect(outside, served.triton_port)
    assert can_connect(outside, port)
    status, body = request(f"http://{outside}:{port}", "/v1/completions", {"prompt": "the", "max_tokens": 4})
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] >= 1


def test_a_dead_engine_ends_streams_and_readiness_until_it_is_back(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    extra: dict[str, Any] = {"ignore_eos": True}
    stream = client.completions.create(model="tiny", prompt="the", max_tokens=LONG, stream=True, extra_body=extra)
    next(iter(stream))
    os.kill(engine_stub(served), signal.SIGKILL)
    with pytest.raises(openai.APIError):
        list(stream)
    wait(lambda: not is_ready(served.url), 10.0)
    wait(lambda: is_ready(served.url), BACK_WITHIN_S)
    assert client.completions.create(model="tiny", prompt="the", max_tokens=2).choices


def test_a_dead_front_end_is_started_again_on_its_port(served: Served) -> None:
    (child,) = (pid for pid in mentioned_in("dspark_trt.server.openai") if parent_of(pid) == served.process.pid)
    os.kill(child, signal.SIGKILL)
    status, _ = request(served.url, "/v1/models")  # waits in the socket, which stays open
    assert status == 200
    assert "the front end failed and is started again: its process ended\n" in served.lines


def test_a_front_end_that_hangs_is_found_by_a_probe(served: Served, tiny_build: Path) -> None:
    """It is there, and its socket takes connections: only a request tells."""
    grpc_address = served.printed(r"\(HTTP\), (\S+) \(gRPC\)")
    places: dict[str, Any] = {"grpc_address": grpc_address, "metrics_url": ""}
    with start_front_end(
        tiny_build, FrontEndOptions(0), **places, probe_interval_s=0.1, probe_timeout_s=2.0
    ) as front_end:
        (child,) = (pid for pid in mentioned_in("dspark_trt.server.openai") if parent_of(pid) == os.getpid())
        assert front_end.fault() is None
        os.kill(child, signal.SIGSTOP)
        wait(lambda: front_end.fault() is not None, 30.0)
        front_end.restart()
        assert front_end.fault() is None
        assert is_ready(front_end.url)


def test_tls_and_a_key(served: Served, tiny_build: Path, tmp_path: Path) -> None:
    certificate, tls_key, keys = (tmp_path / name for name in ("certificate.pem", "key.pem", "keys"))
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(tls_key), "-out", str(certificate)]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(make, check=True, capture_output=True)
    keys.write_text(f"{KEY}\n")
    options = FrontEndOptions(0, api_key_file=keys, tls_certificate=certificate, tls_key=tls_key, model_name="tiny")
    grpc_address = served.printed(r"\(HTTP\), (\S+) \(gRPC\)")
    with start_front_end(tiny_build, options, grpc_address=grpc_address, metrics_url="") as front_end:
        assert front_end.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(certificate))
        transport = {"http_client": openai.DefaultHttpxClient(verify=context)}
        base = {"base_url": f"{front_end.url}/v1", "max_retries": 0, **transport}
        client = openai.OpenAI(api_key=KEY, **base)
        assert client.completions.create(model="tiny", prompt="the", max_tokens=2).choices
        with pytest.raises(openai.AuthenticationError, match="API keys"):
            openai.OpenAI(api_key="wrong", **base).models.list()


def test_the_end_lets_streams_finish_and_says_so_to_balancers(served: Served) -> None:
    """Last: it ends the server."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    extra: dict[str, Any] = {"ignore_eos": True}
    stream = iter(client.completions.create(model="tiny", prompt="the", max_tokens=1500, stream=True, extra_body=extra))
    next(stream)
    served.process.send_signal(signal.SIGTERM)
    wait(lambda: not is_ready(served.url), 10.0)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert served.process.wait(60) == 0
    assert not can_connect("127.0.0.1", int(served.url.rpartition(":")[2]))
