"""A server whose processes are killed, stopped and hung: clients get an error and never a hang, and service comes
back."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.server.http_calls import is_ready
from tests.support.served_process import Served, served
from tests.support.triton_clients import generate, metrics, one, stream

pytestmark = pytest.mark.triton

PROMPT = "the quick brown fox"
LONG = 8000  # tokens: some ten seconds of work
LOADED = 4  # a busy machine may take so many times what a quiet one does
BACK_WITHIN_S = 20.0 * LOADED
ENDED_WITHIN_S = 10.0 * LOADED
ANSWER_WITHIN_S = 5.0 * LOADED


OPTIONS = {
    "drain_s": 2.0,
    "probe_interval_s": 0.5,
    "probe_timeout_s": 8.0,
    "restarts": {"max_restarts": 20, "max_pause_s": 0.5},
}


@pytest.fixture(scope="module")
def running(tiny_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """For tests after which it still runs."""
    with served(tiny_build, tmp_path_factory.mktemp("served") / "log", **OPTIONS) as process:
        yield process


@pytest.fixture
def ending(tiny_build: Path, tmp_path: Path) -> Iterator[Served]:
    """For a test that ends it; it would give requests a minute."""
    with served(tiny_build, tmp_path / "log", drain_s=60.0) as process:
        yield process


def main_process(running: Served) -> int:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running.processes()}
    (found,) = (pid for pid, command in commands.items() if b"--model-repository" in command)
    return found


def await_restart(running: Served) -> str:
    """The reason that `serve` gave for it."""
    reason = running.read_event()
    assert running.read_event() == "the server answers again"
    return reason


def await_refusal_of_connections(http_url: str) -> None:
    deadline = time.monotonic() + 2
    while is_ready(http_url):
        assert time.monotonic() < deadline, "a balancer still sends requests"
        time.sleep(0.02)


class EventStream(threading.Thread):
    """One generate_stream request, read in a thread: its events, or how it ended."""

    def __init__(self, http_url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        body = {"text_input": PROMPT, "max_tokens": max_tokens, "stream": True, "end_id": -1}
        self._request = urllib.request.Request(
            f"{http_url}/v2/models/ensemble/generate_stream", json.dumps(body).encode()
        )
        self.events: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.has_begun = threading.Event()
        self.start()
        assert self.has_begun.wait(30)

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=60) as answer:
                for line in answer:
                    if line.startswith(b"data:"):
                        self.events.append(json.loads(line[5:]))
                        self.has_begun.set()
        except Exception as error:
            self.error = error
        self.has_begun.set()

    def wait(self, seconds: float) -> None:
        self.join(seconds)
        assert not self.is_alive(), "the client hangs"


def request(max_tokens: int) -> dict[str, np.ndarray]:
    return {
        "text_input": one(PROMPT.encode(), np.object_),
        "max_tokens": one(max_tokens, np.int32),
        "stream": one(True, np.bool_),
        "end_id": one(-1, np.int32),
    }


def answers_within(http_url: str, seconds: float) -> float:
    """Seconds until a request is answered."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        try:
            assert generate(http_url, text_input=PROMPT, max_tokens=3, end_id=-1)["num_output_tokens"] == 3
            return time.monotonic() - started
        except (OSError, AssertionError):
            time.sleep(0.1)
    raise AssertionError(f"no answer within {seconds} s")


def test_killed_engine_process_ends_streams_with_an_error_and_service_is_back(running: Served) -> None:
    """Triton itself starts no other, keeps saying that it is ready, and leaves its clients without an end."""
    over_http = EventStream(running.http_url, LONG)
    with stream(running.grpc_address) as over_grpc:
        over_grpc.send("ensemble", request(LONG))
        over_grpc.next()
        before = set(running.processes())
        os.kill(running.stubs("dspark")[0], signal.SIGKILL)
        killed_at = time.monotonic()
        assert str(over_grpc.read_error())
        over_http.wait(ENDED_WITHIN_S)
        assert time.monotonic() - killed_at < ENDED_WITHIN_S
    assert all(event.get("finish_reason", "") == "" for event in over_http.events), (
        "no stream ends as if it were complete"
    )
    assert "the server failed" in await_restart(running)
    answers_within(running.http_url, ANSWER_WITHIN_S)
    assert time.monotonic() - killed_at < BACK_WITHIN_S
    assert len(before & set(running.processes())) == 1, "of the first server nothing is left; the watchdog is the same"
    assert len(running.shared_memory()) == 4, "one region for each model process"


@pytest.mark.parametrize("which", ["postprocessing", "the server"])
def test_every_process_of_a_server_is_replaced(running: Served, which: str) -> None:
    os.kill(main_process(running) if which == "the server" else running.stubs(which)[0], signal.SIGKILL)
    assert "ended" in await_restart(running)
    answers_within(running.http_url, ANSWER_WITHIN_S)
    assert metrics(running.metrics_url)['dspark_steps_total{model="dspark"}'] > 0


def test_engine_process_that_hangs_is_found_by_the_probe(running: Served) -> None:
    """It is there, and Triton says ready: only a request tells."""
    client = EventStream(running.http_url, LONG)
    os.kill(running.stubs("dspark")[0], signal.SIGSTOP)
    assert is_ready(running.http_url)
    assert "it answered no probe" in await_restart(running)
    client.wait(ENDED_WITHIN_S)
    answers_within(running.http_url, ANSWER_WITHIN_S)


def test_nothing_outlives_serve_that_is_killed(ending: Served) -> None:
    EventStream(ending.http_url, LONG)
    ending.process.kill()
    ending.process.wait()
    ending.assert_nothing_is_left(within_s=10)
    assert not is_ready(ending.http_url)


def test_second_signal_stops_at_once(ending: Served) -> None:
    """Signals of other numbers are tried on a stand-in (tests/unit/server/test_supervisor.py)."""
    EventStream(ending.http_url, LONG)
    ending.process.send_signal(signal.SIGTERM)
    ending.read_event()
    started = time.monotonic()
    ending.process.send_signal(signal.SIGTERM)
    assert ending.process.wait(20) == 0
    assert time.monotonic() - started < 5
    ending.assert_nothing_is_left(within_s=5)


def test_stop_refuses_new_work_lets_short_streams_end_and_ends_long_ones_with_an_error(running: Served) -> None:
    """The last test of this server."""
    short, long = EventStream(running.http_url, 100), EventStream(running.http_url, LONG)
    running.process.send_signal(signal.SIGTERM)
    assert running.read_event().startswith("stopping: running requests have 2 s")
    await_refusal_of_connections(running.http_url)
    short.wait(ENDED_WITHIN_S)
    long.wait(ENDED_WITHIN_S)
    assert short.events[-1].get("finish_reason") == "length", short.events[-1]
    assert "the server is stopping" in long.events[-1].get("error", ""), long.events[-1]
    assert running.process.wait(15) == 0
    running.assert_nothing_is_left(within_s=5)
