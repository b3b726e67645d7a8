"""KV memory of one model on a device.

Shape letters: `B` rows of a range, `K` KV heads, `C` row capacity, `H` head dim.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from dspark_trt import bindings
from dspark_trt.dims import DrafterDims, TargetDims
from dspark_trt.errors import EngineBuildError

KEYS, VALUES = 0, 1
_MAX_RANGES = 256  # views are kept for so many ranges: making them costs more than a launch


class DeviceCache:
    """[num_layers, keys and values, num_rows, K, C, H] of the graph's element type, zero at first.

    Zeros, because attention reads whole rows and hides by a mask what is not valid: what lies there must be finite.
    """

    def __init__(self, dims: TargetDims | DrafterDims, device: torch.device) -> None:
        """Raises EngineBuildError where the device has no room."""
        cache, dtype = dims.cache, getattr(torch, dims.element_type)
        shape = (cache.num_layers, 2, cache.num_rows, *cache.row_shape)
        try:
            self._pool = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # out of memory is one
            gib = math.prod(shape) * dtype.itemsize / (1 << 30)
            raise EngineBuildError(
                f"KV memory: {cache.num_rows} rows of {cache.capacity} positions take {gib:.2f} GiB, which {device} does not "
                f"give: {error}; build with a smaller --max-slots or --max-seq-len"
            ) from error
        self._num_layers = cache.num_layers
        self._kept = lru_cache(maxsize=_MAX_RANGES)(self._tensors)

    def rows(self, layer: int, which: int, first_row: int, num_rows: int) -> torch.Tensor:
        """A contiguous view [B, K, C, H] of the keys or the values of a range of rows."""
        return self._pool[layer, which, first_row : first_row + num_rows]

    def tensors(self, group: str, first_row: int, num_rows: int) -> dict[str, torch.Tensor]:
        """Every cache input and output of a row group, by binding name, for a range of rows."""
        return self._kept(group, first_row, num_rows)

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        """Copy the live positions of a row, all layers in one kernel, on the current stream."""
        self._pool[:, :, destination, :, :num_positions].copy_(self._pool[:, :, source, :, :num_positions])

    def _tensors(self, group: str, first_row: int, num_rows: int) -> dict[str, torch.Tensor]:
        tensors = {}
        for layer in range(self._num_layers):
            for name, which in ((bindings.key_cache, KEYS), (bindings.value_cache, VALUES)):
                view = self.rows(layer, which, first_row, num_rows)
                tensors[name(group, layer)] = tensors[bindings.cache_output(name(group, layer))] = view
        return tensors
