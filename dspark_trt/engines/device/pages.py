"""The KV pool of one model on a device, in pages that rows share.

Shape letters: `R` rows of a call, `P` pages, `W` pages of a row, `K` KV heads, `G` positions of a page, `H` head dim.
"""

from __future__ import annotations

import numpy as np
import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.contract.page_plan import table_width
from dspark_trt.contract.protocol import PageLimits
from dspark_trt.engines.row_groups import Int64
from dspark_trt.errors import EngineBuildError


def page_limits(target: TargetDims, drafter: DrafterDims, num_pages: int | None = None) -> PageLimits:
    """Of a pair. num_pages None: every row can be full at once."""
    width = table_width(target, drafter)
    positions = max(drafter.gamma + 1, drafter.block_length)
    if num_pages is None:
        num_pages = target.limits.max_requests * width + 1
    holds_context = drafter.cache.page_positions > 0
    return PageLimits(num_pages, target.cache.page_positions, width, positions, holds_context)


class DevicePages:
    """A pool [P, 2, K, G, H] for each layer, of the graph's element type, zero at first.

    Nothing is cleared when a page gets another owner: no graph lets what stands behind a row's valid positions, or in
    page 0, reach a result.
    """

    def __init__(self, dims: TargetDims | DrafterDims, pages: PageLimits, device: torch.device) -> None:
        """Raises EngineBuildError where the device has no room."""
        cache, dtype = dims.cache, getattr(torch, dims.element_type)
        self.table_width = cache.table_width
        self._num_pages = pages.num_pages
        try:
            self.layers = [
                torch.zeros((pages.num_pages, *cache.page_shape_of(layer)), dtype=dtype, device=device)
                for layer in range(cache.num_layers)
            ]
        except RuntimeError as error:  # out of memory is one
            gib = pages.num_pages * cache.page_elements * dtype.itemsize / (1 << 30)
            raise EngineBuildError(
                f"KV memory: {pages.num_pages} pages of {cache.page_positions} positions take {gib:.2f} GiB, which "
                f"{device} does not give: {error}; use a smaller --gpu-memory-utilization"
            ) from error

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every cache input and output by binding name."""
        names = (bindings.page_cache(layer) for layer in range(len(self.layers)))
        return {
            each: tensor
            for name, tensor in zip(names, self.layers, strict=True)
            for each in (name, bindings.cache_output(name))
        }

    def tables(self, block_tables: Int64 | None, rows: Int64) -> Int64:
        """[R, W] of this model.

        None: a call of no loop, a measurement for example. Each row then has pages of its own, in turn; where there are
        too few, rows share them.
        """
        if block_tables is not None:
            return block_tables[:, : self.table_width]
        pages = rows[:, None] * self.table_width + np.arange(self.table_width)
        result: Int64 = 1 + pages % (self._num_pages - 1)
        return result
