"""When a bucket's call is bound, run, captured, replayed and dropped; captures are in test_cuda_graph_capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dspark_trt.engines.device.graphs import BucketCalls
from dspark_trt.errors import EngineBuildError


class RecordingSession:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.is_failing = False

    def run(self, tensors: Any) -> None:
        raise AssertionError("a bucket is bound")

    def bind(self, tensors: Any) -> Callable[[], None]:
        self.log.append(f"bind {tensors['name']}")

        def call() -> None:
            if self.is_failing:
                raise EngineBuildError("the backend failed, as the test wants it")
            self.log.append(f"call {tensors['name']}")

        return call


class RecordingCapture:
    """A capture executes nothing; a replay executes what was captured."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def warm_up(self, call: Callable[[], object]) -> None:
        call()
        self.log[-1] = f"first {self.log[-1]}"

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        call()
        captured = self.log.pop()
        self.log.append(f"capture {captured}")
        return lambda: self.log.append(f"replay {captured}")


class Parts:
    def __init__(self, *, captures: bool = True, **options: Any) -> None:
        self.log: list[str] = []
        self.session = RecordingSession(self.log)
        self.capture = RecordingCapture(self.log)
        self.calls = BucketCalls(self.session, self.capture if captures else None, **options)

    def __call__(self, *names: str) -> list[str]:
        """What the calls of these buckets did."""
        self.log.clear()
        for name in names:
            self.calls(name, lambda: {"name": name})  # noqa: B023 - called at once
        return list(self.log)


def test_the_first_call_of_a_bucket_is_eager_the_second_is_captured_and_replayed() -> None:
    parts = Parts()
    assert parts("a") == ["bind a", "first call a"]
    assert parts("a") == ["capture call a", "replay call a"]
    assert parts("a", "a") == ["replay call a", "replay call a"]


def test_buckets_have_graphs_of_their_own() -> None:
    parts = Parts()
    parts("a", "b", "a")
    assert parts("b", "a") == ["capture call b", "replay call b", "replay call a"]


def test_without_a_capture_every_call_is_the_bound_one() -> None:
    parts = Parts(captures=False)
    assert parts("a", "a", "b", "a") == ["bind a", "call a", "call a", "bind b", "call b", "call a"]


def test_the_least_recently_used_bucket_is_dropped() -> None:
    parts = Parts(num_kept=2)
    parts("a", "a", "b", "b", "a", "c")  # b is the oldest
    assert parts("a") == ["replay call a"]
    assert parts("b") == ["bind b", "first call b"]


def test_a_first_call_that_fails_is_made_eagerly_again() -> None:
    """A backend that has not run once must not be captured."""
    parts = Parts()
    parts.session.is_failing = True
    with pytest.raises(EngineBuildError):
        parts("a")
    parts.session.is_failing = False
    assert parts("a") == ["first call a"]
    assert parts("a") == ["capture call a", "replay call a"]
