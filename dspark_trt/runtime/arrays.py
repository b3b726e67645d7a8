"""What the runtime needs of an array library beyond the array interface.

Every one of these makes a device wait for the host or the host for the device, so they are called per slot, not per
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_namespace, to_device
from numpy.typing import NDArray

Array = Any  # of the engine's library
Indices = Sequence[int] | Sequence[Sequence[int]] | NDArray[np.int64]


def to_host(array: Array) -> NDArray[Any]:
    return np.asarray(to_device(array, "cpu"))


def wait_for(array: Array) -> None:
    """Wait until an array [L, V] of a device engine is computed: what failed on the way is raised here."""
    to_host(array[:1, :1])


def index_array(indices: Indices, like: Array) -> Array:
    """Integers as an int64 array of the library and on the device of `like`."""
    xp = array_namespace(like)
    return xp.asarray(np.asarray(indices, dtype=np.int64), device=device(like))


def take_rows(array: Array, indices: Sequence[int] | NDArray[np.int64]) -> Array:
    """A copy of some rows of an array of the engine's library."""
    return array_namespace(array).take(array, index_array(indices, array), axis=0)


def largest(values: Array, count: int) -> Array:
    """The `count` largest of every row [..., V], descending. [..., count]"""
    xp = array_namespace(values)
    if is_numpy_namespace(xp):
        size = values.shape[-1]
        return np.sort(np.partition(values, size - count, axis=-1)[..., size - count :], axis=-1)[..., ::-1]
    return xp.topk(values, count).values


def largest_above(values: Array, floor: Array) -> Array:
    """The values of every row [A, V] above its floor [A, 1], descending; smaller ones may stand behind. [A, N]"""
    xp = array_namespace(values)
    if is_numpy_namespace(xp) and len(values) == 1:
        return np.sort(values[values > floor])[None, ::-1]
    return largest(values, int(xp.max(xp.count_nonzero(values > floor, axis=-1))))


def argmax_rows(logits: Array, rows: Sequence[int]) -> tuple[list[int], list[bool]]:
    """Index of the largest of some rows [A, V], the first on ties, and whether all of the row is finite.

    A sum is finite only where every term is: float32 logits stay far below what would overflow it.
    """
    xp = array_namespace(logits)
    if is_numpy_namespace(xp):
        with np.errstate(invalid="ignore", over="ignore"):
            return [int(logits[row].argmax()) for row in rows], [bool(np.isfinite(logits[row].sum())) for row in rows]
    chosen = take_rows(logits, rows)
    found = to_host(xp.stack([xp.argmax(chosen, axis=-1), xp.astype(xp.all(xp.isfinite(chosen), axis=-1), xp.int64)]))
    return found[0].tolist(), (found[1] > 0).tolist()
