"""Calls of a session by bucket: the first one eagerly, from the second one on as a CUDA graph.

The rule: everything goes to torch's current stream, but for a bucket's first call and its capture
(docs/architecture.md).
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Protocol

import torch

from dspark_trt.engines.device.session import DeviceSession, Tensors
from dspark_trt.log import get_logger

logger = get_logger(__name__)

NUM_KEPT_BUCKETS = 96
NUM_FAILURES_BORNE = 3  # captures: a device on which so many fail has none of the others either

Call = Callable[[], object]


class Capture(Protocol):
    """How a bound call becomes one that is replayed."""

    def warm_up(self, call: Call) -> None:
        """The first call: what a backend does once happens here and not inside of a graph."""
        ...

    def capture(self, call: Call) -> Call:
        """A call that does the same; `call` itself where it cannot be captured. Nothing is executed yet."""
        ...


class CudaGraphCapture:
    """CUDA graphs of one device, with one memory pool as long as every capture succeeds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []  # kept: torch may still count them as being recorded
        # A pool ends with its last graph and must not be captured into again: this one keeps it.
        one = torch.zeros(1, device=device)
        self.warm_up(one.zero_)
        self._kept = (one, self.capture(one.zero_))

    def warm_up(self, call: Call) -> None:
        """On the capture's stream: libraries keep workspaces by stream,
        and they must not be allocated in a graph's pool."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            call()
        current.wait_stream(self._stream)

    def capture(self, call: Call) -> Call:
        """A replay of the call; the call itself where it cannot be captured, which a warning tells.

        It ran before, so it runs without a graph, only slower. A capture that CUDA has voided leaves torch's memory
        pool in between, where another capture must not begin: later ones have a new pool. After
        `NUM_FAILURES_BORNE` of them none is tried any more.
        """
        if len(self._failed) >= NUM_FAILURES_BORNE:
            return call
        graph = torch.cuda.CUDAGraph()
        is_collecting = gc.isenabled()
        gc.disable()  # a graph or an event that is freed meanwhile would break the capture
        try:
            self._record(graph, call)
        except Exception as error:  # of the backend too: what is wrong besides, the eager call will say
            self._failed.append(graph)
            self._pool = torch.cuda.graph_pool_handle()
            logger.warning(
                "CUDA graph on %s: a call that ran could not be captured and goes on without a graph, slower (%s)%s",
                self._device,
                error,
                "; no more captures are tried" if len(self._failed) == NUM_FAILURES_BORNE else "",
            )
            return call
        finally:
            if is_collecting:
                gc.enable()
        replay: Call = graph.replay
        return replay

    def _record(self, graph: torch.cuda.CUDAGraph, call: Call) -> None:
        with torch.cuda.stream(self._stream):
            # other threads of the process may allocate meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                with suppress(RuntimeError):  # it leaves the capture, which is void
                    graph.capture_end()
                raise
            graph.capture_end()


class _Bucket:
    def __init__(self, bound: Call, tensors: Tensors) -> None:
        self.bound = bound
        self.tensors = tensors  # a graph keeps addresses only
        self.is_warm = False
        self.replay: Call | None = None


class BucketCalls:
    """The bound calls of one session, least recently used ones dropped."""

    def __init__(self, session: DeviceSession, capture: Capture | None, *, num_kept: int = NUM_KEPT_BUCKETS) -> None:
        """Without a `capture` every call is a bound call."""
        self._session = session
        self._capture = capture
        self._num_kept = num_kept
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()

    def __call__(self, key: Hashable, tensors: Callable[[], Tensors]) -> None:
        """Enqueue the call of a bucket; `tensors` is asked once, and gives what stays at its address.

        Raises EngineBuildError when the backend fails.
        """
        bucket = self._buckets.get(key)
        if bucket is None:
            bound_tensors = tensors()
            bucket = self._buckets[key] = _Bucket(self._session.bind(bound_tensors), bound_tensors)
            if len(self._buckets) > self._num_kept:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        if self._capture is None:
            bucket.bound()
        elif not bucket.is_warm:
            self._capture.warm_up(bucket.bound)
            bucket.is_warm = True
        else:
            if bucket.replay is None:
                bucket.replay = self._capture.capture(bucket.bound)
            bucket.replay()
