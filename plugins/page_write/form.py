"""The form of a PageWrite: everything about the operation that is fixed when a graph is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FloatType = Literal["float32", "float16", "bfloat16"]

INPUT_NAMES = ("keys", "values", "slots", "pages")
OUTPUT_NAMES = ("written",)


@dataclass(frozen=True, slots=True)
class PageWriteForm:
    """Keys and values of new tokens enter the pages of a KV pool, in place."""

    num_kv_heads: int
    head_dim: int
    page_positions: int
    element_type: FloatType

    def __post_init__(self) -> None:
        if min(self.num_kv_heads, self.head_dim, self.page_positions) < 1:
            raise ValueError(
                "expected num_kv_heads, head_dim and page_positions of 1 or more, found "
                f"{self.num_kv_heads}, {self.head_dim} and {self.page_positions}"
            )

    @property
    def input_names(self) -> tuple[str, ...]:
        return INPUT_NAMES

    @property
    def output_names(self) -> tuple[str, ...]:
        return OUTPUT_NAMES
