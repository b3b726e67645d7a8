"""The form of a RowAttention: everything about the operation that is fixed when a graph is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FloatType = Literal["float32", "float16", "bfloat16"]

_INPUT_NAMES = ("query", "pages", "first_tokens", "past_lengths", "query_lengths", "block_tables", "row_tokens")
_CHUNK_NAMES = ("chunk_tokens",)
OUTPUT_NAMES = ("attended",)


@dataclass(frozen=True, slots=True)
class RowAttentionForm:
    """Attention of a row's queries over what is live of the row's pages. The scale is head_dim ** -0.5."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_positions: int  # a power of two, 16 at least
    table_width: int  # pages that a row may have
    num_slots: int  # queries of a row, at most
    num_chunk_slots: int  # of the rows behind them, prompt chunks; 0: there are none
    is_causal: bool  # else every query of a row sees the row's last one
    element_type: FloatType

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of the {self.num_kv_heads} key heads, found {self.num_heads}"
            )
        if min(self.head_dim, self.table_width, self.num_slots) < 1 or self.num_chunk_slots < 0:
            raise ValueError(
                "expected head_dim, table_width and num_slots of 1 or more and num_chunk_slots of 0 or more, found "
                f"{self.head_dim}, {self.table_width}, {self.num_slots} and {self.num_chunk_slots}"
            )
        if self.page_positions < 16 or self.page_positions & (self.page_positions - 1):
            raise ValueError(f"page_positions: expected a power of two from 16 on, found {self.page_positions}")

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def capacity(self) -> int:
        """Positions that a row may have."""
        return self.table_width * self.page_positions

    @property
    def input_names(self) -> tuple[str, ...]:
        return (*_INPUT_NAMES, *_CHUNK_NAMES) if self.num_chunk_slots else _INPUT_NAMES

    @property
    def output_names(self) -> tuple[str, ...]:
        return OUTPUT_NAMES
