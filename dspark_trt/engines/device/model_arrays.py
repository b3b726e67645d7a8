"""Index arrays of the passes that a language model drafts by, made on the host.

Shape letters: `R` requests, `n` slots, `T` packed tokens; `B` KV rows and `S` padded query length of the row group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract import bindings
from dspark_trt.contract.protocol import DraftBatch
from dspark_trt.engines.device.buckets import padded
from dspark_trt.engines.device.calls import group_arrays
from dspark_trt.engines.device.model_block import next_name
from dspark_trt.engines.row_groups import Int64, positions, row_group


class Segments(NamedTuple):
    """Consecutive tokens of some rows, packed one behind the other."""

    rows: Int64
    past: Int64
    query: Int64
    token_ids: Int64

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int, Int64]]) -> Segments:
        """Row, positions before it, and tokens of each."""
        rows, past, tokens = zip(*segments, strict=True)
        query = [len(each) for each in tokens]
        return cls(np.array(rows), np.array(past), np.array(query), np.concatenate(tokens))

    def part(self, first: int, last: int) -> Segments:
        begin, end = int(self.query[:first].sum()), int(self.query[:last].sum())
        of_part = slice(first, last)
        return Segments(self.rows[of_part], self.past[of_part], self.query[of_part], self.token_ids[begin:end])


def pass_arrays(segments: Segments, num_tokens: int, rows: tuple[int, int] | None) -> dict[str, NDArray[Any]]:
    """Padded to `num_tokens`, and to `rows` B, S from row 0 on where they are given."""
    group = row_group(segments.rows, segments.past, segments.query, padded_to=rows)
    return {
        bindings.TOKEN_IDS: padded(segments.token_ids, num_tokens),
        bindings.POSITIONS: padded(positions(segments.past, segments.query), num_tokens),
        bindings.PADDED_INDICES: padded(group.padded_indices, num_tokens),
        **group_arrays(bindings.CONTEXT, group),
    }


def next_arrays(batch: DraftBatch, num_requests: int, num_rows: int) -> dict[str, NDArray[Any]]:
    """Of the second pass: the tokens behind the anchors. Later ones stand a position farther each."""
    past, query = batch.past_lengths + 1, np.ones(len(batch.rows), np.int64)
    group = row_group(batch.rows, past, query, padded_to=(num_rows, 1))
    arrays: dict[str, NDArray[Any]] = {
        bindings.POSITIONS: padded(past, num_requests),
        bindings.LOGIT_ROWS: np.arange(num_requests),
        bindings.PADDED_INDICES: padded(group.padded_indices, num_requests),
        bindings.TEMPERATURES: padded(batch.temperatures, num_requests),
        **group_arrays(bindings.CONTEXT, group),
        bindings.UNIFORMS: padded(batch.uniforms[:, 1:], num_requests).T[:, :, None],
    }
    return {next_name(name): array for name, array in arrays.items()}
