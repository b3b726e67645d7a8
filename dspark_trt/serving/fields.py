"""Typed access to the tensors of one request.

Every tensor carries a batch dimension of 1 in front of the shape that the configuration gives. Messages use the names
of the ensemble's fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import RequestError
from dspark_trt.serving.limits import MAX_BAD_WORD_IDS, MAX_ECHO_CHARACTERS, MAX_JSON_BYTES, check_count, shorten

Tensors = Mapping[str, NDArray[Any]]

_MAX_PACKED_IDS = 4 * MAX_BAD_WORD_IDS  # of a packed list; what it may mean is checked where it is read
_RESERVED_PREFIX = "triton_"  # request parameters of Triton itself


class Fields:
    """The tensors of a request by name; a tensor that was not sent reads as None."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str] | None = None) -> None:
        """`names` maps tensor names to what clients call them, where the two differ."""
        self._tensors = tensors
        self._names = names or {}

    def client_name(self, name: str) -> str:
        return self._names.get(name, name)

    def flag(self, name: str) -> bool | None:
        value = self._one(name)
        return None if value is None else bool(value)

    def integer(self, name: str) -> int | None:
        value = self._one(name)
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        value = self._one(name)
        return None if value is None else float(value)

    def text(self, name: str) -> str | None:
        value = self._one(name)
        return None if value is None else self._decode(name, value)

    def num_bytes(self, name: str) -> int:
        """Bytes of the strings of a field, before any of them is decoded."""
        values = self._tensors.get(name)
        return 0 if values is None else sum(map(len, values.ravel()))

    def texts(self, name: str, max_texts: int) -> tuple[str, ...]:
        """All strings of a list; () where it was not sent. Empty ones are what clients send for "none"."""
        values = self._tensors.get(name)
        if values is not None:
            check_count(self.client_name(name), values.size, max_texts, "words")
        decoded = () if values is None else tuple(self._decode(name, value) for value in values.ravel())
        return tuple(text for text in decoded if text)

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        values = self._tensors.get(name)
        return None if values is None else tuple(int(value) for value in values.ravel())

    def token_sequences(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Token sequences in the packed form [2, n] of TensorRT-LLM: see `pack_sequences`."""
        values = self._tensors.get(name)
        if values is None:
            return ()
        check_count(self.client_name(name), values.size, 2 * _MAX_PACKED_IDS, "numbers")
        if values.size % 2:
            raise self.refusal(name, "two rows of equal length", values.shape)
        ids, ends = values.reshape(2, -1).tolist()
        bounds = [0, *(end for end in ends if end >= 0)]
        if bounds != sorted(bounds) or bounds[-1] > len(ids):
            raise self.refusal(name, "row 1 to hold ascending ends within row 0, then -1", ends)
        sequences = [tuple(ids[start:end]) for start, end in pairwise(bounds)]
        return tuple(sequence for sequence in sequences if sequence)

    def json_object(self, name: str) -> dict[str, Any]:
        value = self._json(name, MAX_JSON_BYTES)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.refusal(name, "a JSON object", value)
        return value

    def json_list(self, name: str, max_bytes: int) -> list[Any] | None:
        value = self._json(name, max_bytes)
        if value is not None and not isinstance(value, list):
            raise self.refusal(name, "a JSON list", value)
        return value

    def refusal(self, name: str, expected: str, found: Any) -> RequestError:
        return RequestError(f"{self.client_name(name)}: expected {expected}, found {shorten(found)}")

    def _one(self, name: str) -> Any:
        values = self._tensors.get(name)
        if values is None:
            return None
        if values.size != 1:
            raise self.refusal(name, "one value (a request is one sequence; send more requests for more)", values.shape)
        return values.ravel()[0]

    def _decode(self, name: str, value: bytes | str) -> str:
        if isinstance(value, str):
            return value
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise RequestError(
                f"{self.client_name(name)}: not valid UTF-8 ({error.reason} at byte {error.start})"
            ) from None

    def _json(self, name: str, max_bytes: int) -> Any:
        text = self.text(name)
        if not text:
            return None
        check_count(self.client_name(name), len(text), max_bytes, "bytes of JSON")
        try:
            return json.loads(text)
        except RecursionError:
            raise RequestError(f"{self.client_name(name)}: not valid JSON (nested too deeply)") from None
        except ValueError as error:  # a number of too many digits, too
            raise RequestError(f"{self.client_name(name)}: not valid JSON ({shorten(str(error))})") from None


def refuse_unknown(parameters: Iterable[str], known: Iterable[str]) -> None:
    """Refuse request parameters: JSON fields that are no input of the model arrive as such, a misspelt one too."""
    unknown = sorted(name for name in parameters if not name.startswith(_RESERVED_PREFIX))
    if unknown:
        named = ", ".join(name[:MAX_ECHO_CHARACTERS] for name in unknown[:8])
        raise RequestError(f"unknown field{'s'[: len(unknown) - 1]} {named}; known fields: {', '.join(known)}")


def pack_sequences(sequences: Iterable[tuple[int, ...]]) -> NDArray[np.int32]:
    """Token sequences as TensorRT-LLM packs them, [1, 2, n]: row 0 all ids, row 1 the end of each sequence, then -1."""
    ids: list[int] = []
    ends: list[int] = []
    for sequence in sequences:
        ids.extend(sequence)
        ends.append(len(ids))
    packed = np.full((1, 2, max(len(ids), 1)), -1, dtype=np.int32)
    packed[0, 0, :] = 0
    packed[0, 0, : len(ids)] = ids
    packed[0, 1, : len(ends)] = ends
    return packed
