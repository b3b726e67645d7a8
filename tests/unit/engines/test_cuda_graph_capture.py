"""CudaGraphCapture where a capture fails, on a torch.cuda that keeps CUDA's and torch's rules and computes nothing.

That torch's own CUDA behaves so is shown in tests/gpu/test_device_runtime.py.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dspark_trt.engines.device.graphs import NUM_FAILURES_BORNE, BucketCalls, CudaGraphCapture
from dspark_trt.errors import EngineBuildError


class RecordingCuda:
    """Streams, pools and graphs: what is enqueued runs at once, or is kept by the graph that is being recorded."""

    def __init__(self) -> None:
        self.num_pools = 0
        self.recording: RecordingGraph | None = None
        self.open_pools: set[int] = set()  # as torch's allocator counts them: a void capture never leaves its pool
        self.is_void = False

    def new_pool(self) -> int:
        self.num_pools += 1
        return self.num_pools

    def enqueue(self, work: Callable[[], None]) -> None:
        if self.recording is None:
            work()
        else:
            self.recording.works.append(work)

    def wait(self) -> None:
        """What CUDA does not permit while it records."""
        if self.recording is not None:
            self.is_void = True
            raise RuntimeError("operation not permitted when stream is capturing")


class RecordingGraph:
    cuda: RecordingCuda

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []
        self.is_whole = False

    def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert not gc.isenabled()
        if pool in self.cuda.open_pools:
            raise RuntimeError("beginAllocateToPool: already recording to the pool")
        self.cuda.open_pools.add(pool)
        self.cuda.recording, self.cuda.is_void, self.pool = self, False, pool

    def capture_end(self) -> None:
        self.cuda.recording = None
        if self.cuda.is_void:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.open_pools.remove(self.pool)
        self.is_whole = True

    def replay(self) -> None:
        assert self.is_whole, "a graph that was never recorded is replayed"
        for work in self.works:
            work()


class Stream:
    def __init__(self, device: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordingCuda:
    cuda = RecordingCuda()

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", cuda.new_pool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (RecordingGraph,), {"cuda": cuda}))
    return cuda


class Session:
    """Its bound calls write down their bucket; those in `waiting` wait for the device, `failing` fail in a capture."""

    def __init__(self, cuda: RecordingCuda) -> None:
        self.cuda = cuda
        self.done: list[str] = []
        self.waiting: set[str] = set()
        self.failing: set[str] = set()

    def run(self, tensors: Any) -> None:
        raise AssertionError("a bucket is bound")

    def bind(self, tensors: Any) -> Callable[[], None]:
        name = tensors["name"]

        def call() -> None:
            if name in self.failing and self.cuda.recording is not None:
                raise EngineBuildError("the backend refuses the call in a capture, as the test wants it")
            self.cuda.enqueue(lambda: self.done.append(name))
            if name in self.waiting:
                self.cuda.wait()

        return call


class Buckets:
    def __init__(self, cuda: RecordingCuda) -> None:
        self.session = Session(cuda)
        self.calls = BucketCalls(self.session, CudaGraphCapture(torch.device("cpu")))

    def __call__(self, *names: str) -> list[str]:
        """What the calls of these buckets did."""
        self.session.done.clear()
        for name in names:
            self.calls(name, lambda: {"name": name})  # noqa: B023 - called at once
        return list(self.session.done)

    def graphs(self) -> list[str]:
        """The buckets that are replayed."""
        buckets = self.calls._buckets
        return [str(key) for key, bucket in buckets.items() if bucket.replay not in (None, bucket.bound)]


@pytest.mark.parametrize("how", ["waiting", "failing"])
def test_a_bucket_whose_capture_fails_runs_eagerly_and_the_others_have_graphs(
    cuda: RecordingCuda, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    buckets = Buckets(cuda)
    getattr(buckets.session, how).add("bad")
    with caplog.at_level(logging.WARNING, logger="dspark_trt"):
        assert buckets("good", "bad") == ["good", "bad"]
        assert buckets("bad", "bad", "bad") == ["bad"] * 3, "nothing is lost and nothing done twice"
    assert [record.message for record in caplog.records if "could not be captured" in record.message] != []
    assert len(caplog.records) == 1, "told once"
    assert buckets("good", "later", "later", "later", "good", "bad") == ["good", *["later"] * 3, "good", "bad"]
    assert sorted(buckets.graphs()) == ["good", "later"]
    assert gc.isenabled()


def test_a_device_that_captures_nothing_is_not_tried_for_ever(
    cuda: RecordingCuda, caplog: pytest.LogCaptureFixture
) -> None:
    buckets = Buckets(cuda)
    names = [f"bad {index}" for index in range(NUM_FAILURES_BORNE + 4)]
    buckets.session.waiting.update(names)
    for _ in range(3):
        assert buckets(*names) == names
    assert sum("could not be captured" in record.message for record in caplog.records) == NUM_FAILURES_BORNE
    assert "no more captures are tried" in caplog.records[-1].message
    assert buckets.graphs() == []


def test_an_interruption_during_a_capture_is_passed_on(cuda: RecordingCuda) -> None:
    capture = CudaGraphCapture(torch.device("cpu"))

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture.capture(interrupted)
    assert cuda.recording is None
    assert gc.isenabled()
