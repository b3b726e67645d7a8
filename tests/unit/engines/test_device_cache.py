"""KV rows of a device, of drafters whose context stands in no pages."""

from __future__ import annotations

import torch

from dspark_trt.contract.cache_dims import CacheDims
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.device.cache import DeviceCache

DIMS = DrafterDims(EngineLimits(4, 32, 16), CacheDims(2, 4, 2, 64, 8), "standard", 97, 32, 1, 3)


def test_a_row_of_a_device_keeps_nothing_of_others_behind_positions_that_moved() -> None:
    """Attention without the plugin reads whole rows: 0 * NaN is NaN."""
    cache = DeviceCache(DIMS, torch.device("cpu"))
    pool = cache._pools[0]
    prefix = torch.randn_like(pool[:, :, 1, :, :8])
    for source, destination in ((1, 1), (1, 2)):
        pool[:, :, 1, :, :8] = prefix
        for row in {source, destination}:
            pool[:, :, row, :, 8:20] = torch.nan
            cache._written[row] = 20
        cache.move_row(source, destination, 8)
        assert torch.equal(pool[:, :, destination, :, :8], prefix)
        assert not pool[:, :, destination, :, 8:].any()
