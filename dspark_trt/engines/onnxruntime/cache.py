"""KV memory of one model on a CPU host: numpy owns it, ONNX Runtime writes into it.

Shape letters: `K` KV heads, `C` row capacity, `H` head dim.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.cache_dims import CacheDims
from dspark_trt.contract.dims import FloatType

KEYS, VALUES = 0, 1


class CachePool:
    """[num_layers, keys and values, num_rows, K, C, H] of the graph's element type, zero at first. Layers with other
    heads stand in an array of their own.

    The memory is an anonymous mapping in small pages, so that it is taken as positions are filled and not row by row.
    """

    def __init__(self, dims: CacheDims, element_type: FloatType) -> None:
        shapes = [dims.row_shape_of(layer) for layer in range(dims.num_layers)]
        self._arrays: dict[tuple[int, int, int], NDArray[np.floating]] = {
            shape: _zeros((count, 2, dims.num_rows, *shape), np.dtype(element_type))
            for shape, count in Counter(shapes).items()
        }
        places = [shapes[:layer].count(shape) for layer, shape in enumerate(shapes)]
        self._layers = [self._arrays[shape][place] for shape, place in zip(shapes, places, strict=True)]

    def rows(self, layer: int, which: int, first_row: int, num_rows: int) -> NDArray[np.floating]:
        """A view [num_rows, K, C, H] of keys or values."""
        rows: NDArray[np.floating] = self._layers[layer][which, first_row : first_row + num_rows]
        return rows

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        """Copy the first positions of a row, all layers at once. What stands behind them is never read."""
        if source == destination:
            return
        for array in self._arrays.values():
            array[:, :, destination, :, :num_positions] = array[:, :, source, :, :num_positions]


def _zeros(shape: tuple[int, ...], dtype: np.dtype[np.floating]) -> NDArray[np.floating]:
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros: NDArray[np.floating] = np.frombuffer(memory, dtype).reshape(shape)
    return zeros
