"""Sizes of the KV memory of one model, in rows or in pages.

Shape letters: `P` pages, `K` KV heads, `H` head dim, `C` positions that a cache row has room for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Rows of `standard` attention have a multiple of so many positions: whole tiles of native kernels.
TILE_POSITIONS = 64
PAGE_POSITIONS = 64  # of a page of `paged` attention: a tile of the kernels at head dim 128


@dataclass(frozen=True, slots=True)
class CacheDims:
    """The KV memory of one model: for each layer a key and a value array [num_rows, K, C, H].

    With pages it is, for each layer, [P, 2, K, page_positions, H], where P is found out when engines are opened; C is
    what the pages of a row have room for.
    """

    num_layers: int
    num_rows: int
    num_kv_heads: int  # K
    capacity: int  # C
    head_dim: int  # H
    layer_heads: tuple[tuple[int, int], ...] = ()  # K and H of each layer, where they differ
    page_positions: int = 0  # 0: rows

    @property
    def table_width(self) -> int:
        """Pages that a row may have."""
        return self.capacity // self.page_positions

    def page_shape_of(self, layer: int) -> tuple[int, int, int, int]:
        """[2, K, page_positions, H] of that layer: keys, then values."""
        num_kv_heads, _, head_dim = self.row_shape_of(layer)
        return (2, num_kv_heads, self.page_positions, head_dim)

    @property
    def page_elements(self) -> int:
        """Of one page in all layers."""
        return sum(math.prod(self.page_shape_of(layer)) for layer in range(self.num_layers))

    def row_shape_of(self, layer: int) -> tuple[int, int, int]:
        """[K, C, H] of that layer."""
        num_kv_heads, head_dim = self.layer_heads[layer] if self.layer_heads else (self.num_kv_heads, self.head_dim)
        return (num_kv_heads, self.capacity, head_dim)

    @property
    def num_elements(self) -> int:
        """Of the whole memory."""
        of_rows = sum(math.prod(self.row_shape_of(layer)) for layer in range(self.num_layers))
        return 2 * self.num_rows * of_rows
