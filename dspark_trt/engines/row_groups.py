"""Index tensors of one row group: packed segments laid out on a contiguous range of KV rows (see `bindings`).

Shape letters: `R` segments, `T` packed tokens of the group, `B` rows of the range, `S` longest query.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A range of rows [first_row, first_row + B) and where its tokens stand."""

    first_row: int
    tokens: Int64  # [B, S] packed index of each padded query; padding points at the row's last token
    past_lengths: Int64  # [B], 0 for rows without tokens
    query_lengths: Int64  # [B], 0 for rows without tokens
    padded_indices: Int64  # [T] b * S + i of each token

    @property
    def num_rows(self) -> int:
        return len(self.past_lengths)


def row_group(
    rows: Int64,
    past_lengths: Int64,
    query_lengths: Int64,
    *,
    first_token: int = 0,
    padded_to: tuple[int, int] | None = None,
    min_query_length: int = 1,
) -> RowGroup:
    """The group of some segments, given in packed order:
    [R] each, `first_token` the packed index of the first one's first.

    `padded_to` (B, S): the range begins at row 0 and has these sizes; without it, it is the smallest that holds the
    segments. Without segments, one row without tokens: attention operators do not take an empty batch (ONNX Runtime's
    standard one says so, GroupQueryAttention can divide by zero). On ONNX Runtime that row costs 2 to 3 % of a
    one-token step.

    `min_query_length`: a row with fewer tokens has so many queries all the same, the further ones valid to the
    operator. What they write stands behind the row's tokens, where the next call writes again.

    Padding points at the row's own last token, so that nothing of another request, a NaN say, is ever written into a
    row that is read.
    """
    if not len(rows):
        none = np.zeros(1, np.int64)
        return RowGroup(0, none[:, None], none, none, none[:0])
    first_row = int(rows.min()) if padded_to is None else 0
    num_rows, longest = padded_to or (int(rows.max()) - first_row + 1, max(int(query_lengths.max()), min_query_length))
    at = rows - first_row
    ends = query_lengths.cumsum()
    begins = ends - query_lengths
    padded_indices = np.arange(ends[-1]) + np.repeat(at * longest - begins, query_lengths)
    tokens = np.zeros((num_rows, longest), np.int64)
    tokens[at] = first_token + begins[:, None] + np.minimum(np.arange(longest), query_lengths[:, None] - 1)
    past, query = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    past[at] = past_lengths
    query[at] = np.maximum(query_lengths, min_query_length)
    return RowGroup(first_row, tokens, past, query, padded_indices)


def positions(past_lengths: Int64, query_lengths: Int64) -> Int64:
    """Position of every packed token, [T]."""
    ends = query_lengths.cumsum()
    begin_positions = past_lengths - ends + query_lengths
    result: Int64 = np.arange(ends[-1]) + np.repeat(begin_positions, query_lengths)
    return result
