"""The seam between the device runtime and what computes a graph on a device:
TensorRT, or PyTorch straight from a checkpoint.

A session knows one graph of `bindings`. Tensors are torch tensors of one device, by binding name, every input and
output of the graph among them; a cache and its output are the same tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Tensors = dict[str, Any]  # torch tensors, C-contiguous, of the element types and shapes of the graph's bindings


class DeviceSession(Protocol):
    """One compiled graph. Work is enqueued on torch's current stream of the device and never waited for."""

    def run(self, tensors: Tensors) -> None:
        """Enqueue one call. Raises EngineBuildError when the backend fails."""
        ...

    def bind(self, tensors: Tensors) -> Callable[[], None]:
        """A call on these very tensors, for the life of the session whatever else is run in between.

        Calling it enqueues, allocates nothing that outlives the call and can be captured in a CUDA graph, after it was
        called once outside of a capture. Raises EngineBuildError when the backend fails.
        """
        ...
