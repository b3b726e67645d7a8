"""Inputs and outputs of the graphs, and the parts of the KV pools that they are bound to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract import bindings
from dspark_trt.engines.onnxruntime.cache import KEYS, VALUES, CachePool
from dspark_trt.engines.row_groups import RowGroup


def cache_range(
    pool: CachePool, num_layers: int, group: str, first_row: int, num_rows: int
) -> dict[str, NDArray[np.floating]]:
    """Cache input names and the part of the pool that they stand for."""
    arrays = {}
    for layer in range(num_layers):
        arrays[bindings.key_cache(group, layer)] = pool.rows(layer, KEYS, first_row, num_rows)
        arrays[bindings.value_cache(group, layer)] = pool.rows(layer, VALUES, first_row, num_rows)
    return arrays


def group_inputs(name: str, group: RowGroup) -> dict[str, NDArray[Any]]:
    return {
        bindings.group_tokens(name): group.tokens,
        bindings.group_past_lengths(name): group.past_lengths,
        bindings.group_query_lengths(name): group.query_lengths,
    }


def reshaped(buffer: NDArray[Any], *shape: int) -> NDArray[Any]:
    """The beginning of a flat buffer."""
    return buffer[: math.prod(shape)].reshape(shape)


def int64(*arrays: Any) -> tuple[NDArray[np.int64], ...]:
    return tuple(np.ascontiguousarray(array, np.int64) for array in arrays)
