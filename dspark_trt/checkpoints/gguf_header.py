"""Bounds of a GGUF file's metadata, before the gguf package reads it: it would allocate for whatever a number says.

Format: magic, version, number of tensors, number of keys; then keys, each a string, a type and a value. A file that is
not little-endian has another version than those below. Source: the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from dspark_trt.errors import CheckpointError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by type
_LEAST_KEY_BYTES = 8 + 4 + 1  # an empty name, a type, a byte
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8  # an empty name, no dimensions, a type, an offset
_VERSIONS = (2, 3)


def check_header(path: Path) -> None:
    """Raises CheckpointError when the file is none of GGUF, or when a count or a length leads out of it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data).header()
    except (OSError, ValueError, struct.error) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path}: not a complete GGUF file ({error}); download it again") from None


class _Walk:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> None:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        if (version := self._number("<I")) not in _VERSIONS:
            raise ValueError(f"version {version}, expected one of {_VERSIONS}")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        self._check(num_tensors, _LEAST_TENSOR_BYTES, "tensors")
        self._check(num_keys, _LEAST_KEY_BYTES, "metadata keys")
        for _ in range(num_keys):
            self._skip_string()
            self._skip_value(self._number("<I"))

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def _skip_string(self) -> None:
        length = self._number("<Q")
        self._check(length, 1, "bytes of a string")
        self._at += length

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            self._skip_array()
        elif kind in _SCALAR_BYTES:
            self._check(1, _SCALAR_BYTES[kind], "bytes of a number")
            self._at += _SCALAR_BYTES[kind]
        else:
            raise ValueError(f"a value of type {kind}, which the format does not have")

    def _skip_array(self) -> None:
        kind, count = self._number("<I"), self._number("<Q")
        if kind not in _SCALAR_BYTES and kind != _STRING:
            raise ValueError(f"an array of elements of type {kind}, which no model has")
        self._check(count, _SCALAR_BYTES.get(kind, 8), "elements of an array")
        if kind != _STRING:
            self._at += count * _SCALAR_BYTES[kind]
            return
        for _ in range(count):
            self._skip_string()

    def _check(self, count: int, least_bytes: int, what: str) -> None:
        left = len(self._data) - self._at
        if count * least_bytes > left:
            raise ValueError(f"{count} {what} where {left} bytes are left")
