"""Two servers behind nginx, as deploy/nginx.conf configures it: it spreads streams, and the loss of one is survived."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from fetch_debian_program import fetch
from soak_server import SoakServer, soak_server

from dspark_trt.server.options import ServeOptions, with_ports
from tests.support import nginx
from tests.support.openai_clients import events, request, wait
from tests.support.triton_clients import one, stream, text_of

pytestmark = pytest.mark.triton

REPOSITORY = Path(__file__).parents[2]
BODY = {"prompt": "the quick brown fox", "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Balanced:
    url: str  # of OpenAI's API, through nginx
    grpc_address: str
    servers: tuple[SoakServer, SoakServer]

    def complete(self, max_tokens: int) -> str:
        """A streamed completion. "" where it ended early."""
        status, body = request(self.url, "/v1/completions", {**BODY, "max_tokens": max_tokens, "stream": True})
        assert status == 200, body
        found = events(body)
        if not body.endswith(b"[DONE]\n\n") or any("error" in event for event in found):
            return ""
        return "".join(event["choices"][0]["text"] for event in found)

    def num_answered(self) -> list[int]:
        return [server.outcomes().get("length", 0) for server in self.servers]


@contextmanager
def both_servers(build_dir: Path) -> Iterator[tuple[SoakServer, SoakServer]]:
    """Started side by side."""
    with ExitStack() as stack, ThreadPoolExecutor(2) as starting:
        begun = [starting.submit(stack.enter_context, soak_server(build_dir)) for _ in range(2)]
        first, second = (each.result() for each in begun)
        yield first, second


@pytest.fixture(scope="module")
def balanced(tiny_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    folder = tmp_path_factory.mktemp("nginx")
    program = fetch("nginx", REPOSITORY / "build" / "downloads")
    ports = with_ports(ServeOptions(0, 0, 0))
    with both_servers(tiny_build) as (first, second):
        replaced = {
            "listen 9000": f"listen 127.0.0.1:{ports.http_port}",
            "listen 8001": f"listen 127.0.0.1:{ports.grpc_port}",
        }
        for number, server in enumerate((first, second)):
            replaced[f"dspark-{number}:9000"] = urlsplit(server.openai_url).netloc
            replaced[f"dspark-{number}:8001"] = server.grpc_address
        configuration = nginx.configured(REPOSITORY / "deploy" / "nginx.conf", folder, replaced)
        url = f"http://127.0.0.1:{ports.http_port}"
        with nginx.running(program, folder, configuration, f"{url}/health"):
            yield Balanced(url, f"127.0.0.1:{ports.grpc_port}", (first, second))


def test_streams_are_spread_over_both_servers(balanced: Balanced) -> None:
    before = balanced.num_answered()
    with ThreadPoolExecutor(8) as clients:
        answers = set(clients.map(balanced.complete, [40] * 16))
    assert len(answers) == 1
    assert answers != {""}
    assert all(now > then for now, then in zip(balanced.num_answered(), before, strict=True))


def test_grpc_streams_pass_and_are_spread(balanced: Balanced) -> None:
    before, expected = balanced.num_answered(), balanced.complete(30)
    fields = {
        "text_input": one(b"the quick brown fox", np.object_),
        "max_tokens": one(30, np.int32),
        "temperature": one(0.0, np.float32),
        "stream": one(True, np.bool_),
        "end_id": one(-1, np.int32),
    }
    with stream(balanced.grpc_address) as first, stream(balanced.grpc_address) as second:
        for opened in (first, second):
            opened.send("ensemble", fields, enable_empty_final_response=True)
        for opened in (first, second):
            results = [result for result in opened.read_all() if result.get_response().outputs]
            assert "".join(map(text_of, results)) == expected
    assert all(now > then for now, then in zip(balanced.num_answered(), before, strict=True))


def test_loss_of_a_server_ends_its_streams_and_no_request_after_it(balanced: Balanced) -> None:
    """The last test here: one server is gone then."""
    lost, kept = balanced.servers
    expected = balanced.complete(2000)
    with ThreadPoolExecutor(8) as clients:
        running = [clients.submit(balanced.complete, 2000) for _ in range(8)]
        deadline = time.monotonic() + 30
        while not (lost.num_running() and kept.num_running()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        lost.process.kill()
        ended = [call.exception() is None and call.result() for call in running]
    assert expected in ended, "those on the other server go on"
    assert any(text != expected for text in ended), "those on the lost one end, and not as if they were whole"
    wait(lambda: not is_listening(lost.openai_url))  # its front end ends a moment after the process that was killed
    for _ in range(12):
        status, body = request(balanced.url, "/v1/completions", {**BODY, "max_tokens": 3})
        assert status == 200, body
        assert json.loads(body)["usage"]["completion_tokens"] == 3


def is_listening(url: str) -> bool:
    where = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((where.hostname, where.port)) == 0
