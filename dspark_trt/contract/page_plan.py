"""How many pages a GPU's memory has room for: told before a build, at a build and when engines are opened.

What `--gpu-memory-utilization` leaves beside weights and everything else becomes pages; a page holds positions of the
target's K/V and of the drafter's context.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.errors import CapacityError

DEFAULT_UTILIZATION = 0.9  # of a GPU's memory, as vLLM's option of the same name
# Scratch, outputs and CUDA itself, before a compiler has estimated them (engines/tensorrt/compiler/memory.py)
OTHER_DEVICE_BYTES = 3 << 30
MOST_ELEMENTS = 2**31 - 1  # of one tensor, whose elements TensorRT counts with 32 bits
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The pages of a pool; page 0 is nobody's."""

    num_pages: int
    page_positions: int
    page_bytes: int  # of both models
    table_width: int  # pages of a request of max_seq_len positions
    max_seq_len: int
    max_requests: int

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def num_full_requests(self) -> int:
        """Requests of max_seq_len positions that fit at once."""
        return min((self.num_pages - 1) // self.table_width, self.max_requests)

    @property
    def words(self) -> str:
        """The plan in words."""
        fit = f"{self.num_full_requests} of {self.max_requests} requests"
        return (
            f"{self.num_pages} pages of {self.page_positions} positions, {self.kv_bytes / 1e9:.2f} GB: {fit} fit with "
            f"{self.max_seq_len} positions each, shorter ones in greater number"
        )


def page_bytes(target: TargetDims, drafter: DrafterDims | None) -> int:
    """Of a page in both models."""
    return sum(dims.cache.page_elements * ELEMENT_BYTES[dims.element_type] for dims in _paged(target, drafter))


def row_bytes(drafter: DrafterDims | None) -> int:
    """Of a context that stands in rows of its own, which is that of families without pages."""
    if drafter is None or drafter.cache.page_positions:
        return 0
    return drafter.cache.num_elements * ELEMENT_BYTES[drafter.element_type]


def most_pages(target: TargetDims, drafter: DrafterDims | None) -> int:
    """Of a pool, page 0 included: every row full, or what TensorRT counts of one layer."""
    caches = [dims.cache for dims in _paged(target, drafter)]
    elements = [prod(cache.page_shape_of(layer)) for cache in caches for layer in range(cache.num_layers)]
    full = target.limits.max_requests * table_width(target, drafter) + 1
    return min(full, MOST_ELEMENTS // max(elements, default=1))


def table_width(target: TargetDims, drafter: DrafterDims | None) -> int:
    """Pages of a row of full length, a draft block behind it included."""
    return max(dims.cache.table_width for dims in _paged(target, drafter))


def _paged(target: TargetDims, drafter: DrafterDims | None) -> list[TargetDims | DrafterDims]:
    return [dims for dims in (target, drafter) if dims is not None and dims.cache.page_positions]


def plan_pages(
    target: TargetDims, drafter: DrafterDims | None, *, device_bytes: int, utilization: float, other_bytes: int
) -> PagePlan:
    """Pages for what `utilization` of `device_bytes` leaves beside `other_bytes`.

    Raises CapacityError where not even one request of max_seq_len positions fits.
    """
    of_page, most = page_bytes(target, drafter), most_pages(target, drafter)
    other_bytes += row_bytes(drafter)
    room = int(device_bytes * utilization) - other_bytes
    width = table_width(target, drafter)
    num_pages = min(max(room, 0) // of_page, most)
    limits = target.limits
    if num_pages < width + 1:
        raise CapacityError(
            f"KV memory: a request of {limits.max_seq_len} positions takes {(width + 1) * of_page / 1e9:.2f} GB, and "
            f"{utilization:g} of {device_bytes / 1e9:.1f} GB of GPU memory leave {max(room, 0) / 1e9:.2f} GB beside "
            f"{other_bytes / 1e9:.2f} GB of weights, scratch and the rest; lower --max-seq-len, raise "
            "--gpu-memory-utilization, or take a smaller target or a larger GPU"
        )
    return PagePlan(num_pages, target.cache.page_positions, of_page, width, limits.max_seq_len, limits.max_requests)
