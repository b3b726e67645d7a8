"""The form of a PrefixSelect: everything about the operation that is fixed when a graph is written."""

from __future__ import annotations

from dataclasses import dataclass

INPUT_NAMES = (
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
    "num_admitted",
)
OUTPUT_NAMES = (
    "verify_len",
    "num_tokens",
    "first_tokens",
    "token_requests",
    "token_ids",
    "positions",
    "padded_indices",
    "decode.tokens",
    "decode.past_lengths",
    "decode.query_lengths",
)


@dataclass(frozen=True, slots=True)
class PrefixSelectForm:
    """Selection of a step's drafts by the budget of `lagged_budget` (paper section 5.2)."""

    gamma: int

    @property
    def input_names(self) -> tuple[str, ...]:
        return INPUT_NAMES

    @property
    def output_names(self) -> tuple[str, ...]:
        return OUTPUT_NAMES
