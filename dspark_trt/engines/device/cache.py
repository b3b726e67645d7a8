"""KV memory of one model on a device.

Shape letters: `B` rows of a range, `K` KV heads, `C` row capacity, `H` head dim.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np
import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.engines.row_groups import Int64
from dspark_trt.errors import EngineBuildError

KEYS, VALUES = 0, 1
_MAX_RANGES = 256  # views are kept for so many ranges: making them costs more than a launch


class DeviceCache:
    """[num_layers, keys and values, num_rows, K, C, H] of the graph's element type, zero at first; layers with other
    heads stand in a pool of their own.

    Attention without the plugin reads whole rows and hides by a mask what is not valid, but 0 * NaN is NaN: what lies
    there must be finite. So the pool begins with zeros, and a row that a request begins in is cleared of what the last
    one left (`prepare`, or `move_row` where its first positions are there already); otherwise one request whose numbers
    overflow would spoil its row for good.
    """

    def __init__(self, dims: TargetDims | DrafterDims, device: torch.device) -> None:
        """Raises EngineBuildError where the device has no room."""
        cache, dtype = dims.cache, getattr(torch, dims.element_type)
        shapes = [cache.row_shape_of(layer) for layer in range(cache.num_layers)]
        try:
            pools = {
                shape: torch.zeros((count, 2, cache.num_rows, *shape), dtype=dtype, device=device)
                for shape, count in Counter(shapes).items()
            }
        except RuntimeError as error:  # out of memory is one
            gib = cache.num_elements * dtype.itemsize / (1 << 30)
            raise EngineBuildError(
                f"KV memory: {cache.num_rows} rows of {cache.capacity} positions take {gib:.2f} GiB, which {device} "
                f"does not give: {error}; build with a smaller --max-requests or --max-seq-len"
            ) from error
        self._pools = tuple(pools.values())
        places = [shapes[:layer].count(shape) for layer, shape in enumerate(shapes)]
        self._layers = [pools[shape][place] for shape, place in zip(shapes, places, strict=True)]
        self._max_seq_len = dims.limits.max_seq_len
        self._written = np.zeros(cache.num_rows, np.int64)  # positions of each row that may hold something
        # positions from max_seq_len on that may, in any row: rows without tokens are written there
        self._num_behind = 0
        self._kept = lru_cache(maxsize=_MAX_RANGES)(self._tensors)

    def rows(self, layer: int, which: int, first_row: int, num_rows: int) -> torch.Tensor:
        """A contiguous view [B, K, C, H] of the keys or the values of a range of rows."""
        return self._layers[layer][which, first_row : first_row + num_rows]

    def tensors(self, group: str, first_row: int, num_rows: int) -> dict[str, torch.Tensor]:
        """Every cache input and output of a row group, by binding name, for a range of rows."""
        return self._kept(group, first_row, num_rows)

    def prepare(self, rows: Int64, past_lengths: Int64, num_positions: int) -> None:
        """Before a call that writes up to `num_positions` positions of some rows: clear the rows that begin."""
        for row in rows[past_lengths == 0] if self._num_behind else ():
            self._clear(int(row), 0)
        self._written[rows] = np.maximum(self._written[rows], past_lengths + num_positions)
        self._num_behind = max(self._num_behind, num_positions)

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        """Copy the first positions of a row, all layers of a shape in one kernel, on the current stream; clear what was
        behind them."""
        if source != destination:
            for pool in self._pools:
                pool[:, :, destination, :, :num_positions].copy_(pool[:, :, source, :, :num_positions])
        self._clear(destination, num_positions)

    def _clear(self, row: int, num_kept: int) -> None:
        """Zero what was written in a row behind its first `num_kept` positions."""
        behind = slice(self._max_seq_len, self._max_seq_len + self._num_behind)
        for positions in (slice(num_kept, int(self._written[row])), behind):
            for pool in self._pools:
                pool[:, :, row, :, positions].zero_()
        self._written[row] = num_kept

    def _tensors(self, group: str, first_row: int, num_rows: int) -> dict[str, torch.Tensor]:
        tensors = {}
        for layer in range(len(self._layers)):
            for name, which in ((bindings.key_cache, KEYS), (bindings.value_cache, VALUES)):
                view = self.rows(layer, which, first_row, num_rows)
                tensors[name(group, layer)] = tensors[bindings.cache_output(name(group, layer))] = view
        return tensors
