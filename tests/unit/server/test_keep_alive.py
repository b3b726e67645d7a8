"""What is watched of a server and of its front end, and what is done about it; the processes are stand-ins."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from dspark_trt.errors import EngineBuildError
from dspark_trt.server import prober, serve
from dspark_trt.server.options import RestartPolicy, ServeOptions
from dspark_trt.server.prober import Prober
from dspark_trt.server.serve import keep_alive

POLICY = RestartPolicy(max_restarts=2, first_pause_s=0.0)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_CHECK_INTERVAL_S", 0.0)


class Process:
    """A server, or its front end. Faults are told one after the other; behind them it is well for ever."""

    def __init__(self, faults: list[str | None], start_errors: list[Exception] | None = None) -> None:
        self.options = ServeOptions(restarts=POLICY)
        self._faults, self._start_errors = faults, start_errors or []
        self.num_starts = 0

    def fault(self) -> str | None:
        if not self._faults:
            raise KeyboardInterrupt  # the test has seen enough
        return self._faults.pop(0)

    def kill(self) -> None:
        pass

    def start(self) -> None:
        self.num_starts += 1
        if self._start_errors:
            raise self._start_errors.pop(0)

    restart = start

    def log_tail(self) -> str:
        return ""


def run(server: Process, front_end: Process | None = None) -> list[str]:
    """The events, up to the end of the faults."""
    events: list[str] = []
    arguments: Any = (server, events.append, front_end)
    with pytest.raises(KeyboardInterrupt):
        keep_alive(*arguments)
    return events


def test_start_that_the_machine_refuses_is_tried_again() -> None:
    """No memory or descriptors for a process: an OSError, with which `serve` itself ended."""
    server = Process(["a stub died"], [OSError(12, "Cannot allocate memory"), EngineBuildError("not ready")])
    server.options = ServeOptions(restarts=RestartPolicy(max_restarts=3, first_pause_s=0.0))
    events = run(server)
    assert server.num_starts == 3
    assert "Cannot allocate memory" in events[1]
    assert "not ready" in events[2]
    assert events[-1] == "the server answers again"


def test_front_end_that_fails_is_started_again_and_given_up_in_the_end() -> None:
    healthy = [None] * 20
    front_end = Process(["it answered no probe for 61 s", None], [EngineBuildError("does not answer")])
    assert run(Process(list(healthy)), front_end) == [
        "the front end failed and is started again: it answered no probe for 61 s"
    ]
    hopeless: Any = Process(["its process ended"] * 3)
    server: Any = Process(list(healthy))
    with pytest.raises(EngineBuildError, match="the front end failed 3 times and is given up; the last time: its proc"):
        keep_alive(server, lambda message: None, hopeless)
    assert hopeless.num_starts == 2


def test_process_without_answers_is_hung_and_one_with_answers_is_not() -> None:
    silent = threading.Event()

    def ask() -> None:
        if silent.is_set():
            raise OSError

    asked = Prober(ask, 0.01, 0.3)
    try:
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            assert asked.fault() is None
            time.sleep(0.01)
        silent.set()
        until = time.monotonic() + 20
        while (fault := asked.fault()) is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert "it answered no probe" in fault
    finally:
        asked.close()


def test_time_in_which_this_process_stood_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` was suspended for two minutes (Ctrl-Z, a laptop that slept) and replaced a healthy server."""
    now = 0.0
    monkeypatch.setattr(prober.time, "monotonic", lambda: now)
    asked = Prober(lambda: None, 3600.0, 60.0)
    try:
        assert asked.fault() is None
        now = 120.0
        assert asked.fault() is None, "it woke up"
        while now < 181.0:
            now += 1.0
            fault = asked.fault()
        assert fault is not None, "awake, and without an answer for a minute"
    finally:
        asked.close()
