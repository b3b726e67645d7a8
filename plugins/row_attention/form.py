"""The form of a RowAttention: everything about the operation that is fixed when a graph is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FloatType = Literal["float32", "float16", "bfloat16"]

INPUT_NAMES = ("query", "keys", "values", "last_seen")
OUTPUT_NAMES = ("attended",)


@dataclass(frozen=True, slots=True)
class RowAttentionForm:
    """Attention of a row's queries over the live part of its row in the KV cache. The scale is head_dim ** -0.5."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int  # positions of a cache row
    num_slots: int  # of the longest padded query
    element_type: FloatType

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of the {self.num_kv_heads} key heads, found {self.num_heads}"
            )
        if min(self.head_dim, self.capacity, self.num_slots) < 1:
            raise ValueError(
                "expected head_dim, capacity and num_slots of 1 or more, found "
                f"{self.head_dim}, {self.capacity} and {self.num_slots}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def input_names(self) -> tuple[str, ...]:
        return INPUT_NAMES

    @property
    def output_names(self) -> tuple[str, ...]:
        return OUTPUT_NAMES
