"""From a target batch to the calls of the target graph that compute it: shapes and index arrays, on the host.

Rows of a call stand in the order of their segments. Padding has no row: page 0 takes what it writes
(docs/architecture.md).

Shape letters: `R` requests that decode, `G` gamma, `T` packed tokens, `L` logit rows; `B` rows and `S` padded query
length of a row group, `W` pages of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dspark_trt.contract import bindings
from dspark_trt.contract.protocol import EngineLimits, TargetBatch
from dspark_trt.engines.capacity import check_rows, check_tokens
from dspark_trt.engines.device.buckets import bucket, chunk_runs, query_bucket
from dspark_trt.engines.row_groups import Int64, RowGroup, positions, row_group
from dspark_trt.errors import CapacityError

GroupShape = tuple[int, int]  # B, S
_IDLE: GroupShape = (1, 1)


@dataclass(frozen=True, slots=True)
class CallShape:
    """The sizes of one call. `prefill` None: a bucket, which asks for the logits of all of its tokens."""

    num_tokens: int  # T
    num_logits: int  # L
    decode: GroupShape
    prefill: GroupShape | None = None


@dataclass(frozen=True, slots=True)
class TargetCall:
    """One call. Index arrays by binding name, without those that the selection writes on the device."""

    shape: CallShape
    arrays: Mapping[str, Int64]
    num_tokens: int  # without padding
    num_logits: int


def num_decode_tokens(batch: TargetBatch, num_selected: int | None = None) -> int:
    """Packed tokens of the segments that verify drafts, those selected on the device included."""
    return int(batch.query_lengths[: batch.num_decode].sum()) + (num_selected or 0)


def check_batch(
    batch: TargetBatch, new_positions: Int64, gamma: int, limits: EngineLimits, num_selected: int | None = None
) -> None:
    """Raises CapacityError where a call of the batch would not fit. `new_positions`: of each segment, at most."""
    check_rows(limits, batch.rows, batch.past_lengths + new_positions)
    check_tokens(limits, len(batch.token_ids) + (num_selected or 0))
    if (longest := int(batch.query_lengths[: batch.num_decode].max(initial=0))) > gamma + 1:
        raise CapacityError(
            f"a row would verify {longest} tokens, the engine takes an anchor and {gamma} drafts (gamma of the "
            "drafter); pass longer segments as prefill chunks"
        )


def target_calls(
    batch: TargetBatch,
    tables: Int64,
    gamma: int,
    limits: EngineLimits,
    num_selected: int | None = None,
    *,
    pads_chunks: bool = False,
) -> list[TargetCall]:
    """The calls of a checked batch, in the order of its tokens and logit rows: one, but where chunks are padded to one
    another and would be too large.

    `tables` [R, W] of the segments. `num_selected` drafts are selected on the device and inserted behind the anchors,
    of which the batch then consists.
    """
    n = batch.num_decode
    num_plain, num_decoded = num_decode_tokens(batch), num_decode_tokens(batch, num_selected)
    wanted = batch.logit_rows[batch.logit_rows < num_plain]
    if num_selected is not None:
        wanted = np.arange(num_decoded)
    of_chunks = batch.logit_rows[batch.logit_rows >= num_plain] - num_plain
    lengths = batch.query_lengths[n:]
    runs = chunk_runs(lengths, limits.max_batch_tokens if pads_chunks else None)
    decode = _decode_part(batch, tables[:n], gamma, limits, num_selected)
    if not runs and len(wanted) == num_decoded:
        return [_bucket_call(decode, limits)]
    calls = []
    for first, last in runs or [(0, 0)]:
        part = decode if first == 0 else _nothing(tables.shape[1])
        chunks = slice(n + first, n + last)
        begin = num_plain + int(batch.query_lengths[n : n + first].sum())
        end = begin + int(batch.query_lengths[chunks].sum())
        inside = of_chunks[(of_chunks >= begin - num_plain) & (of_chunks < end - num_plain)] - (begin - num_plain)
        logit_rows = np.concatenate([wanted if first == 0 else inside[:0], inside + part.num_tokens])
        calls.append(_whole_call(batch, tables, part, chunks, batch.token_ids[begin:end], logit_rows))
    return calls


@dataclass(frozen=True, slots=True)
class _DecodePart:
    """The tokens that decode. `group` None: the selection writes everything about them on the device but the tables."""

    shape: GroupShape
    token_ids: Int64  # [T]
    positions: Int64  # [T]
    group: RowGroup | None
    tables: Int64  # [B, W]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def arrays(self) -> dict[str, Int64]:
        tables = {bindings.group_block_tables(bindings.DECODE): self.tables}
        return tables if self.group is None else group_arrays(bindings.DECODE, self.group) | tables


def _nothing(table_width: int) -> _DecodePart:
    none = np.empty(0, np.int64)
    return _DecodePart(_IDLE, none, none, row_group(none, none, none), np.zeros((1, table_width), np.int64))


def _decode_part(
    batch: TargetBatch, tables: Int64, gamma: int, limits: EngineLimits, num_selected: int | None
) -> _DecodePart:
    n = batch.num_decode
    if n == 0:
        return _nothing(tables.shape[1])
    past, query = batch.past_lengths[:n], batch.query_lengths[:n]
    num_rows = bucket(n, limits.max_requests)
    tables = padded_tables(tables, num_rows)
    num_tokens = num_decode_tokens(batch, num_selected)
    if num_selected is not None:
        unknown = np.zeros(num_tokens, np.int64)
        return _DecodePart((num_rows, gamma + 1), unknown, unknown, None, tables)
    shape = num_rows, query_bucket(int(query.max()), gamma)
    group = row_group(np.arange(n), past, query, padded_to=shape)
    return _DecodePart(shape, batch.token_ids[:num_tokens], positions(past, query), group, tables)


def _bucket_call(decode: _DecodePart, limits: EngineLimits) -> TargetCall:
    num_tokens = bucket(decode.num_tokens, limits.max_batch_tokens)
    arrays = decode.arrays
    if decode.group is not None:
        padding = np.zeros(num_tokens - decode.num_tokens, np.int64)
        arrays |= {
            bindings.TOKEN_IDS: np.concatenate([decode.token_ids, padding]),
            bindings.POSITIONS: np.concatenate([decode.positions, padding]),
        }
    shape = CallShape(num_tokens, num_tokens, decode.shape)
    return TargetCall(shape, arrays, decode.num_tokens, decode.num_tokens)


def _whole_call(
    batch: TargetBatch, tables: Int64, decode: _DecodePart, chunks: slice, token_ids: Int64, logit_rows: Int64
) -> TargetCall:
    past, query = batch.past_lengths[chunks], batch.query_lengths[chunks]
    prefill = row_group(np.arange(len(query)), past, query, first_token=decode.num_tokens)
    chunk_positions = positions(past, query) if len(query) else past
    arrays = decode.arrays | {
        bindings.TOKEN_IDS: np.concatenate([decode.token_ids, token_ids]),
        bindings.POSITIONS: np.concatenate([decode.positions, chunk_positions]),
        bindings.LOGIT_ROWS: logit_rows if len(logit_rows) else np.zeros(1, np.int64),  # engines take no empty tensors
        bindings.group_block_tables(bindings.PREFILL): padded_tables(tables[chunks], prefill.num_rows),
        **group_arrays(bindings.PREFILL, prefill),
    }
    num_rows, longest = prefill.tokens.shape
    shape = CallShape(decode.num_tokens + len(token_ids), max(len(logit_rows), 1), decode.shape, (num_rows, longest))
    return TargetCall(shape, arrays, shape.num_tokens, len(logit_rows))


def padded_tables(tables: Int64, num_rows: int) -> Int64:
    """[B, W], rows of page 0 behind those given."""
    return np.pad(tables, ((0, num_rows - len(tables)), (0, 0)))


def group_arrays(name: str, group: RowGroup) -> dict[str, Int64]:
    """The index inputs of a row group by binding name."""
    return {
        bindings.group_tokens(name): group.tokens,
        bindings.group_past_lengths(name): group.past_lengths,
        bindings.group_query_lengths(name): group.query_lengths,
    }
