"""Memory that calls read and write: small inputs that the host sends in one copy, small outputs that it fetches in one.

Every copy is enqueued on torch's current stream, between pinned memory and the device. Pinned memory that a copy may
still read is not written: there are several pieces, used in turn, each with an event behind its last copy. On a CPU
device the same code copies at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dspark_trt_plugins.operation import Tensor
from numpy.typing import NDArray

from dspark_trt.contract.bindings import Binding

ALIGNMENT_BYTES = 256  # what TensorRT asks for at most; CUDA's own allocations have it
NUM_HOST_PIECES = 4  # a step sends two or three times, and the host is at most one step ahead
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Place:
    begin: int  # bytes
    num_bytes: int
    element_type: str
    shape: tuple[int, ...]


class Layout:
    """Where tensors of given shapes stand in a block of bytes, one behind the other."""

    def __init__(self, tensors: Iterable[Binding | Tensor], extents: Mapping[str, int], *, begin: int = 0) -> None:
        """`extents` gives the size of every letter in the bindings' shapes."""
        self.begin = begin
        self._places: dict[str, _Place] = {}
        end = begin
        for tensor in tensors:
            shape = tuple(extents[size] if isinstance(size, str) else size for size in tensor.shape)
            num_bytes = int(np.prod(shape, dtype=np.int64)) * getattr(torch, tensor.element_type).itemsize
            self._places[tensor.name] = _Place(end, num_bytes, tensor.element_type, shape)
            end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.end = end

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a block of bytes."""
        return {
            name: memory[place.begin : place.begin + place.num_bytes]
            .view(getattr(torch, place.element_type))
            .view(place.shape)
            for name, place in self._places.items()
        }

    def addresses(self, memory: torch.Tensor) -> dict[str, int]:
        """Of the same tensors."""
        first = memory.data_ptr()
        return {name: first + place.begin for name, place in self._places.items()}

    def arrays(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Views of a block of bytes on the host. Only element types that numpy has."""
        return {
            name: memory[place.begin : place.begin + place.num_bytes]
            .view(np.dtype(place.element_type))
            .reshape(place.shape)
            for name, place in self._places.items()
        }


def with_index(device: torch.device) -> torch.device:
    """The device as tensors that are made there name it: a CUDA device without an index is torch's current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Bytes on the host, zero at first; pinned where a GPU copies from or to them."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class _HostPiece:
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = host_memory(num_bytes, device)
        self.array: NDArray[np.uint8] = self.memory.numpy()
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def wait_until_copied(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def copy_enqueued(self, device: torch.device) -> None:
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(device))


class StagedInputs:
    """A block of device memory for inputs that the host makes: at fixed addresses, filled by one copy a call."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._device = device
        self._pieces = [_HostPiece(num_bytes, device) for _ in range(NUM_HOST_PIECES)]
        self._next = 0

    def send(self, *parts: tuple[Layout, Arrays]) -> None:
        """Enqueue the copy of some layouts, which stand one behind the other, and whatever lies between them.

        Tensors that `arrays` lacks get undefined values. Returns without waiting, unless all pieces are still being
        read.
        """
        piece = self._pieces[self._next]
        self._next = (self._next + 1) % len(self._pieces)
        piece.wait_until_copied()
        for layout, arrays in parts:
            views = layout.arrays(piece.array)
            for name, array in arrays.items():
                views[name][...] = array
        begin, end = parts[0][0].begin, parts[-1][0].end
        self.memory[begin:end].copy_(piece.memory[begin:end], non_blocking=True)
        piece.copy_enqueued(self._device)


class FetchedOutputs:
    """A block of device memory for small outputs, all of which the host fetches in one copy."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        memory = torch.zeros(layout.end, dtype=torch.uint8, device=device)
        self.tensors = layout.tensors(memory)
        self._memory = memory
        self._piece = _HostPiece(layout.end, device)
        self._num_fetched = 0

    def fetch(self) -> Callable[[], dict[str, NDArray[Any]]]:
        """Enqueue the copy. The result waits for it, and for nothing enqueued later; call it before the next fetch."""
        self._piece.memory.copy_(self._memory, non_blocking=True)
        self._piece.copy_enqueued(self._device)
        self._num_fetched += 1
        number = self._num_fetched

        def wait() -> dict[str, NDArray[Any]]:
            assert number == self._num_fetched, "outputs were fetched again before they were read"
            self._piece.wait_until_copied()
            return {name: array.copy() for name, array in self._layout.arrays(self._piece.array).items()}

        return wait


class FetchedBlock:
    """The same with a layout that every call chooses, from the beginning of the block on."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._device = device
        self._piece = _HostPiece(num_bytes, device)
        self._num_fetched = 0

    def fetch(self, layout: Layout) -> Callable[[], dict[str, NDArray[Any]]]:
        """As `FetchedOutputs.fetch`."""
        self._piece.memory[: layout.end].copy_(self.memory[: layout.end], non_blocking=True)
        self._piece.copy_enqueued(self._device)
        self._num_fetched += 1
        number = self._num_fetched

        def wait() -> dict[str, NDArray[Any]]:
            assert number == self._num_fetched, "outputs were fetched again before they were read"
            self._piece.wait_until_copied()
            return {name: array.copy() for name, array in layout.arrays(self._piece.array).items()}

        return wait
