"""Tensors of one or many safetensors files, mapped, never loaded whole.

The header is parsed here and not by the `safetensors` package, because the graph writer refers to float32 tensors in
place and needs the byte offset of each one. Format: 8 bytes little-endian header length, a JSON header, then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.config import read_json
from dspark_trt.checkpoints.opening import check_file
from dspark_trt.checkpoints.spec import TensorInfo
from dspark_trt.errors import CheckpointError, abridged

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADS_FILE = "medusa_lm_head.safetensors"  # of Medusa, whose heads stand beside no model

_MAX_NAME_BYTES = 255  # of a file
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype(np.float64),
}
_INTEGER_DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "BOOL": np.dtype(np.bool_),
}
_STORED_DTYPES = {**_NUMPY_DTYPES, **_INTEGER_DTYPES, "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}


class SafetensorsStore:
    """A WeightStore. Other element types than floats are listed under the format's own name, and are no weights."""

    def __init__(self, entries: Mapping[str, TensorInfo]) -> None:
        self._entries = dict(sorted(entries.items()))

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def has(self, name: str) -> bool:
        return name in self._entries

    def info(self, name: str) -> TensorInfo:
        return self._entries[name]

    def array(self, name: str) -> NDArray[np.generic]:
        return self._read(name, _NUMPY_DTYPES[self._entries[name].dtype])

    def integers(self, name: str) -> NDArray[np.generic]:
        """A tensor of whole numbers or truth values: int64, int32, int8 or bool."""
        return self._read(name, _INTEGER_DTYPES[self._entries[name].dtype])

    def stored(self, name: str) -> NDArray[np.generic]:
        """A tensor of any element type that some format of weights has, as it is stored."""
        return self._read(name, _STORED_DTYPES[self._entries[name].dtype])

    def _read(self, name: str, dtype: np.dtype[Any]) -> NDArray[np.generic]:
        info = self._entries[name]
        assert info.file is not None
        assert info.offset is not None
        num_bytes = math.prod(info.shape) * dtype.itemsize
        data = self._maps[info.file][info.offset : info.offset + num_bytes]
        array: NDArray[np.generic] = data.view(dtype).reshape(info.shape)
        return array

    def without(self, names: Iterable[str]) -> SafetensorsStore:
        """The same store with some tensors left out."""
        left_out = set(names)
        return SafetensorsStore({name: info for name, info in self._entries.items() if name not in left_out})

    @cached_property
    def _maps(self) -> dict[Path, NDArray[np.uint8]]:
        files = {info.file for info in self._entries.values() if info.file is not None}
        return {file: np.memmap(file, np.uint8, "r") for file in files}


def shard_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint folder: one, or those that the index names.

    Raises CheckpointError when there are none, or when one that the index names is not there.
    """
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    if not (folder / INDEX_FILE).is_file():
        if (folder / HEADS_FILE).is_file():
            return (folder / HEADS_FILE,)
        others = sorted(file.name for pattern in ("*.bin", "*.gguf", "*.pth", "*.pt") for file in folder.glob(pattern))
        found = f"; found {', '.join(others)}, which is another format" if others else ""
        raise CheckpointError(
            f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}{found}. Save the model as safetensors with "
            "save_pretrained(..., safe_serialization=True), or give the path of a .gguf file"
        )
    names = indexed_files(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {INDEX_FILE} names {len(names)} files, {missing[0]} is not there ({len(missing)} missing); "
            "download the checkpoint again"
        )
    return tuple(folder / name for name in names)


def indexed_files(folder: Path) -> list[str]:
    """The names of the shards that a folder's index lists, whatever they are called. Raises CheckpointError."""
    return sorted(set(_weight_map(folder).values()))


def open_safetensors(folder: Path, rename: Callable[[str], str]) -> SafetensorsStore:
    """All tensors of a checkpoint folder under `rename`d names.

    Raises CheckpointError for a truncated or malformed file, a tensor in two files, two tensors that get one name, and
    files that do not hold what the index says.
    """
    entries: dict[str, TensorInfo] = {}
    stored_names: set[str] = set()
    for file in shard_files(folder):
        for stored_name, info in _read_header(file).items():
            name = rename(stored_name)
            if name in entries:
                raise CheckpointError(f"{file}: tensor {stored_name} is there twice; download the checkpoint again")
            entries[name] = info
            stored_names.add(stored_name)
    if (
        not (folder / SINGLE_FILE).is_file()
        and (folder / INDEX_FILE).is_file()
        and (listed := set(_weight_map(folder))) != stored_names
    ):
        name = sorted(listed ^ stored_names)[0]
        has, lacks = ("index", "files") if name in listed else ("files", "index")
        raise CheckpointError(
            f"{folder / INDEX_FILE}: tensor {name} is in the {has}, but not in the {lacks}; download the checkpoint "
            "again"
        )
    return SafetensorsStore(entries)


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map is not a mapping of tensor names to files; download the file again")
    for name in weight_map.values():
        if Path(name).name != name or "\0" in name or len(name.encode()) > _MAX_NAME_BYTES:
            raise CheckpointError(f"{path}: {name[:80]!r} is not a plain file name; expected files beside the index")
    return weight_map


def _read_header(file: Path) -> dict[str, TensorInfo]:
    check_file(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise _damaged(file, f"{size} bytes are too few for a header of {header_bytes} bytes")
        try:
            header = json.loads(stream.read(header_bytes), object_pairs_hook=_without_repeats)
            header.pop("__metadata__", None)
            _check_order(file, header)
            return {name: _entry(file, name, entry, 8 + header_bytes, size) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(file, f"the header cannot be read ({error})") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name stands there twice")
    return values


def _check_order(file: Path, header: dict[str, Any]) -> None:
    """Offsets are whole numbers, and no byte belongs to two tensors."""
    spans = []
    for name, entry in header.items():
        if not isinstance(entry["dtype"], str):
            raise _damaged(file, f"tensor {name[:80]} has the type {abridged(entry['dtype'])}")
        numbers = (*entry["shape"], *entry["data_offsets"])
        if any(type(number) is not int or number < 0 for number in numbers) or len(entry["data_offsets"]) != 2:
            found = f"has shape {abridged(entry['shape'])} and offsets {abridged(entry['data_offsets'])}"
            raise _damaged(file, f"tensor {name[:80]} {found}")
        spans.append((*entry["data_offsets"], name))
    last_end, last_name = 0, ""
    for begin, end, name in sorted(spans):
        if begin > end or begin < last_end:
            raise _damaged(file, f"tensor {name[:80]} at bytes {begin} to {end} overlaps {last_name[:80] or 'itself'}")
        last_end, last_name = end, name


def _entry(file: Path, name: str, entry: dict[str, Any], data_start: int, size: int) -> TensorInfo:
    dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if data_start + end > size:
        raise _damaged(file, f"tensor {name[:80]} ends at byte {data_start + end}, the file at byte {size}")
    known = _STORED_DTYPES.get(dtype)
    if known is not None and math.prod(shape) * known.itemsize != end - begin:
        what = f"tensor {name[:80]} of shape {abridged(list(shape))} and type {dtype}"
        raise _damaged(file, f"{what} does not take {end - begin} bytes")
    return TensorInfo(dtype=dtype, shape=shape, file=file, offset=data_start + begin)


def _damaged(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{file}: not a complete safetensors file: {reason}; download it again")
