"""KV memory of one model on a CPU host: numpy owns it, ONNX Runtime writes into it.

Shape letters: `K` KV heads, `C` row capacity, `H` head dim.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.dims import CacheDims, FloatType

KEYS, VALUES = 0, 1


class CachePool:
    """[num_layers, keys and values, num_rows, K, C, H] of the graph's element type, zero at first.

    The memory is an anonymous mapping in small pages, so that it is taken as positions are filled and not row by row.
    """

    def __init__(self, dims: CacheDims, element_type: FloatType) -> None:
        shape = (dims.num_layers, 2, dims.num_rows, *dims.row_shape)
        dtype = np.dtype(element_type)
        num_bytes = max(math.prod(shape) * dtype.itemsize, 1)  # 0 where a drafter has no layers
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._array: NDArray[np.floating] = np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)

    def rows(self, layer: int, which: int, first_row: int, num_rows: int) -> NDArray[np.floating]:
        """A view [num_rows, K, C, H] of keys or values."""
        return self._array[layer, which, first_row : first_row + num_rows]

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        """Copy the live positions of a row, all layers at once."""
        self._array[:, :, destination, :, :num_positions] = self._array[:, :, source, :, :num_positions]
