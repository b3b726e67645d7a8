"""The form of a PrefixSelect: everything about the operation that is fixed when a graph is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["early_stop", "lagged_budget"]

_COMMON_INPUTS = (
    "confidence_logits",
    "temperatures",
    "caps",
    "is_forced",
    "anchor_ids",
    "draft_ids",
    "past_lengths",
    "block_rows",
    "row_requests",
    "row_query_lengths",
    "token_index",
)
OUTPUT_NAMES = (
    "verify_len",
    "num_tokens",
    "first_tokens",
    "token_requests",
    "token_ids",
    "positions",
    "output_slots",
    "decode.tokens",
    "decode.past_lengths",
    "decode.query_lengths",
)


@dataclass(frozen=True, slots=True)
class PrefixSelectForm:
    """Prefix scheduler of a step (paper section 3.2.2, Algorithm 1, and section 5.2)."""

    gamma: int
    mode: Mode

    @property
    def input_names(self) -> tuple[str, ...]:
        modes: dict[Mode, tuple[str, ...]] = {
            "early_stop": ("step_ms", "prefill_tokens"),
            "lagged_budget": ("num_admitted",),
        }
        return _COMMON_INPUTS + modes[self.mode]

    @property
    def output_names(self) -> tuple[str, ...]:
        return OUTPUT_NAMES
