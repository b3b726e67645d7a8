"""Weights of a graph folder: by hard link to the checkpoint's own file where that is possible, else written once.

ONNX keeps a large weight outside the graph as (file name, offset, length), relative to the graph's folder. A matrix of
a safetensors (or GGUF) file that has the graph's element type is already in the wanted form, Linear layout [out, in]
included, so the folder gets a hard link to that file and no copy. A link survives renaming the folder and works for the
symlinks of a hub cache, which ONNX Runtime would refuse. Where no link can be made (another file system) and for other
element types, the matrix is written into a file of our own, chunk by chunk, so that memory never holds the weights
twice. Vectors stay in the graph file.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dspark_trt.checkpoints.spec import WeightStore
from dspark_trt.contract.dims import FloatType
from dspark_trt.errors import ExportError
from dspark_trt.graphs.builder import ONNX_TYPES
from dspark_trt.graphs.numbers import NUMPY_TYPES
from dspark_trt.graphs.quantize import block_names, quantize_blocks, quantize_rows, row_names

_ALIGNMENT_BYTES = 4096  # of a tensor in our own file: a page, so that it can be memory-mapped
_CHUNK_ELEMENTS = 1 << 24
# the types that a weight can be beyond
_LARGEST = {NUMPY_TYPES["float16"]: "65504", NUMPY_TYPES["bfloat16"]: "3.3895e+38"}


_READABLE = stat.S_IRGRP | stat.S_IROTH


class TensorSource(Protocol):
    """Where a graph takes its weights from."""

    def tensor(self, name: str, element_type: FloatType) -> TensorProto:
        """The tensor of that canonical name, in that element type."""
        ...

    def blocks(self, name: str, bits: int) -> tuple[TensorProto, TensorProto]:
        """The matrix of that canonical name in quantised blocks, and their scales."""
        ...

    def rows(self, name: str) -> tuple[TensorProto, TensorProto]:
        """The matrix of that canonical name quantised by rows, [in, out], and its scales [out]."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of that tensor in the checkpoint."""
        ...


class WeightFolder:
    """The weight files of one checkpoint in one graph folder.
    Close it (or leave `with`) before the graphs are opened."""

    def __init__(self, folder: Path, prefix: str, store: WeightStore) -> None:
        self._folder = folder
        self._prefix = prefix
        self._store = store
        self._placed: dict[tuple[str, str], TensorProto] = {}  # by name and element type
        self._links: dict[Path, str | None] = {}  # resolved source file -> name in the folder; None: no link possible
        self._stream: BinaryIO | None = None

    def __enter__(self) -> WeightFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    @property
    def own_file(self) -> Path:
        """The file that holds what could not be linked; it exists only if there was something."""
        return self._folder / f"{self._prefix}.weights"

    def tensor(self, name: str, element_type: FloatType) -> TensorProto:
        """Raises ExportError when a value is beyond the element type."""
        key, dtype = (name, element_type), NUMPY_TYPES[element_type]
        if key not in self._placed:
            if len(self._store.info(name).shape) < 2:
                array = _converted(self._store.array(name), dtype, f"{self._prefix}: {name}")
                self._placed[key] = numpy_helper.from_array(array, name)
            else:
                linked = self._linked(name, element_type)
                self._placed[key] = linked or self.write(name, self._store.array(name), dtype)
        return self._placed[key]

    def blocks(self, name: str, bits: int) -> tuple[TensorProto, TensorProto]:
        blocks_name, scales_name = block_names(name, bits)
        blocks_key, scales_key = (blocks_name, "uint8"), (scales_name, "float32")
        if blocks_key not in self._placed:
            blocks, scales = quantize_blocks(self._store.array(name), bits)
            self._placed[blocks_key] = self.write(blocks_name, blocks, blocks.dtype)
            self._placed[scales_key] = self.write(scales_name, scales, scales.dtype)
        return self._placed[blocks_key], self._placed[scales_key]

    def rows(self, name: str) -> tuple[TensorProto, TensorProto]:
        integers_name, scales_name = row_names(name)
        integers_key, scales_key = (integers_name, "int8"), (scales_name, "float32")
        if integers_key not in self._placed:
            integers, scales = quantize_rows(self._store.array(name))
            self._placed[integers_key] = self.write(integers_name, integers, integers.dtype)
            self._placed[scales_key] = numpy_helper.from_array(scales, scales_name)
        return self._placed[integers_key], self._placed[scales_key]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._store.info(name).shape

    def write(self, name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic]) -> TensorProto:
        """Append an array to our own file, converted to `dtype` chunk by chunk.

        Raises ExportError when a value is beyond `dtype`.
        """
        if self._stream is None:
            self._stream = self.own_file.open("wb")
        self._stream.write(b"\0" * (-self._stream.tell() % _ALIGNMENT_BYTES))
        offset = self._stream.tell()
        for chunk in _chunks(array):
            self._stream.write(_converted(chunk, dtype, f"{self._prefix}: {name}").view(np.uint8).data)
        return _external(name, dtype, array.shape, self.own_file.name, offset)

    def _linked(self, name: str, element_type: FloatType) -> TensorProto | None:
        info, dtype = self._store.info(name), NUMPY_TYPES[element_type]
        if info.file is None or info.offset is None or info.dtype != element_type or info.offset % dtype.itemsize:
            return None
        location = self._link(info.file.resolve())
        return None if location is None else _external(name, dtype, info.shape, location, info.offset)

    def _link(self, source: Path) -> str | None:
        if source not in self._links:
            location = f"{self._prefix}-{len(self._links)}{source.suffix}"
            try:
                _check_readable_by_others(source)
                os.link(source, self._folder / location)
            except OSError:  # another file system, a file of another owner, or no links at all
                self._links[source] = None
            else:
                self._links[source] = location
        return self._links[source]


def _check_readable_by_others(source: Path) -> None:
    """A link shares its file's mode: weights that only their owner reads are copied, as a server may run as another
    user.

    Raises PermissionError.
    """
    if source.stat().st_mode & _READABLE != _READABLE:
        raise PermissionError(f"{source} is for its owner alone")


class PlacedWeights:
    """Weights of a checkpoint that a graph in the same folder already refers to: shared, under names with a prefix."""

    def __init__(self, graph: Path, prefix: str, store: WeightStore) -> None:
        self._graph = graph
        self._prefix = prefix
        self._store = store
        model = onnx.load(graph, load_external_data=False)
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def tensor(self, name: str, element_type: FloatType) -> TensorProto:
        return self._shared(name, ONNX_TYPES[element_type])

    def blocks(self, name: str, bits: int) -> tuple[TensorProto, TensorProto]:
        blocks_name, scales_name = block_names(name, bits)
        return self._shared(blocks_name, TensorProto.UINT8), self._shared(scales_name, TensorProto.FLOAT)

    def rows(self, name: str) -> tuple[TensorProto, TensorProto]:
        integers_name, scales_name = row_names(name)
        return self._shared(integers_name, TensorProto.INT8), self._shared(scales_name, TensorProto.FLOAT)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._store.info(name).shape

    def _shared(self, name: str, data_type: int) -> TensorProto:
        wanted = f"a weight {name} of type {TensorProto.DataType.Name(data_type)} to share with the drafter"
        found = f"{len(self._tensors)} others"
        if name in self._tensors:
            found = TensorProto.DataType.Name(self._tensors[name].data_type)
        if found != TensorProto.DataType.Name(data_type):
            raise ExportError(
                f"{self._graph}: expected {wanted}, found {found}; write the target graph with the same precision first"
            )
        tensor = TensorProto()
        tensor.CopyFrom(self._tensors[name])
        tensor.name = f"{self._prefix}{name}"
        return tensor


def _external(
    name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...], location: str, offset: int
) -> TensorProto:
    tensor = TensorProto(
        name=name, data_type=helper.np_dtype_to_tensor_dtype(dtype), dims=shape, data_location=TensorProto.EXTERNAL
    )
    length = math.prod(shape) * dtype.itemsize
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _converted(array: NDArray[np.generic], dtype: np.dtype[np.generic], name: str) -> NDArray[np.generic]:
    """Contiguous, in that element type. Raises ExportError when a value is beyond it."""
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(array, dtype)
    if dtype in _LARGEST and array.dtype != dtype and np.isinf(converted).any():
        remedy = "choose --precision bf16" if dtype == np.float16 else "choose --backend onnxruntime"
        raise ExportError(
            f"{name}: expected weights within {dtype} ({_LARGEST[dtype]}), found "
            f"{np.abs(array.astype(np.float32)).max():.4g}; {remedy}"
        )
    return converted


def _chunks(array: NDArray[np.generic]) -> Iterator[NDArray[np.generic]]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        yield flat[start : start + _CHUNK_ELEMENTS]
