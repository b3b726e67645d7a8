# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""RowAttention in OpenAI Triton: attend_split, then combine_splits.

A call has `num_splits` splits at most, and a split `split_positions` positions or more: launches.py chooses both from
the sizes of the call. What is shared out is what is live of a row and not its capacity, so a row that one split holds
is written by attend_split itself, and combine_splits has nothing to do for it. A program of attend_split holds the
queries of all heads that share a key head, so that keys and values are read once; of a row that is split it leaves
(largest score, sum of weights, weighted sum of values) for combine_splits. How a row is split depends on the sizes of
the call and on its own last_seen, so its bits do not depend on what the other rows hold.

Scores are in bits: exp2 is what the hardware has. Nothing is accumulated with atomics and every sum has a fixed order.

Shape letters: `B` rows, `N` query heads, `K` KV heads, `S` padded query length, `C` row capacity, `H` head dim, `P`
splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(
    -1e30
)  # below every score and finite, so that a query that sees nothing of a split gets 0 and no NaN


@triton.jit
def share_of_splits(
    last_seen,  # [B, S]
    row,
    num_slots,
    num_splits,
    split_positions,
    CAPACITY: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_SHARE: tl.constexpr,
):
    """Live positions of a row, and how many of them a split has: a multiple of BLOCK_SHARE.

    A single split has all positions, live or not: a program need not look at every slot of a prompt chunk to learn
    where its own queries end.
    """
    num_live = tl.full([], CAPACITY, tl.int32)
    share = num_live
    if num_splits > 1:
        last = tl.full([], 0, tl.int32)
        for first in range(0, num_slots, BLOCK_S):
            slots = first + tl.arange(0, BLOCK_S)
            limits = tl.load(last_seen + row * num_slots + slots, mask=slots < num_slots, other=0)
            last = tl.maximum(last, tl.max(limits, axis=0).to(tl.int32))
        num_live = tl.minimum(last + 1, CAPACITY)
        blocks = tl.cdiv(tl.cdiv(num_live, num_splits), BLOCK_SHARE)
        share = tl.maximum(blocks * BLOCK_SHARE, split_positions)
    return num_live, share


@triton.jit
def attend_split(
    query,  # [B, N, S, H]
    keys,  # [B, K, C, H]
    values,  # [B, K, C, H]
    last_seen,  # [B, S]
    accumulators,  # [B, N, S, P, H] float32; in a form that is never split: none
    maxima,  # [B, N, S, P] float32
    sums,  # [B, N, S, P] float32
    attended,  # [B, N, S, H]
    num_slots,
    num_query_blocks,
    num_splits,
    split_positions,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    CAPACITY: tl.constexpr,
    H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_SHARE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One split of the positions, for one key head of a row and a block of the queries that share it."""
    program, split = tl.program_id(0), tl.program_id(1)
    head = program // num_query_blocks  # of all key heads of all rows
    row = head // NUM_KV_HEADS
    num_live, share = share_of_splits(
        last_seen, row, num_slots, num_splits, split_positions, CAPACITY, BLOCK_S, BLOCK_SHARE
    )
    begin = split * share
    if begin < num_live:
        num_queries = NUM_HEADS // NUM_KV_HEADS * num_slots  # they stand one behind the other: [N, S] is [K, N / K, S]
        queries = (program % num_query_blocks) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        is_query = queries < num_queries
        at_query = head.to(tl.int64) * num_queries + queries
        limits = tl.load(last_seen + row * num_slots + queries % num_slots, mask=is_query, other=-1).to(tl.int32)
        hs = tl.arange(0, BLOCK_H)
        is_value = is_query[:, None] & (hs < H)[None, :]
        q = tl.load(query + at_query[:, None] * H + hs[None, :], mask=is_value, other=0.0)
        first = head.to(tl.int64) * (CAPACITY * H)
        largest = tl.zeros([BLOCK_Q], tl.float32) + LOWEST
        total = tl.zeros([BLOCK_Q], tl.float32)
        weighted = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
        # no query of this block sees further; what none of them sees of the split leaves LOWEST behind
        end = tl.minimum(begin + share, tl.max(limits, axis=0) + 1)
        for block in range(begin, end, BLOCK_C):
            positions = block + tl.arange(0, BLOCK_C)
            at = first + positions[:, None] * H + hs[None, :]
            is_read = (positions < end)[:, None] & (hs < H)[None, :]  # 0 * NaN would be NaN
            k = tl.load(keys + at, mask=is_read, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (LOG2_E * H**-0.5)
            scores = tl.where(positions[None, :] <= limits[:, None], scores, -float("inf"))
            larger = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - larger[:, None])
            fade = tl.exp2(largest - larger)
            total = total * fade + tl.sum(weights, axis=1)
            v = tl.load(values + at, mask=is_read, other=0.0)
            weighted = tl.dot(weights.to(v.dtype), v, weighted * fade[:, None], input_precision="ieee")
            largest = larger
        num_whole = tl.where(share < num_live, 0, num_queries)  # all of them or none
        is_whole = queries < num_whole
        weighted = weighted / tl.where(is_whole, total, 1.0)[:, None]
        at_value = at_query[:, None] * H + hs[None, :]
        is_output = is_whole[:, None] & (hs < H)[None, :]
        tl.store(attended + at_value, weighted.to(attended.dtype.element_ty), mask=is_output)
        if accumulators is not None:
            is_part = is_query & (queries >= num_whole)
            at_split = at_query * num_splits + split
            tl.store(maxima + at_split, largest, mask=is_part)
            tl.store(sums + at_split, total, mask=is_part)
            at_part = at_split[:, None] * H + hs[None, :]
            tl.store(accumulators + at_part, weighted, mask=is_part[:, None] & (hs < H)[None, :])


@triton.jit
def combine_splits(
    last_seen,  # [B, S]
    accumulators,  # [B, N, S, P, H] float32
    maxima,  # [B, N, S, P] float32
    sums,  # [B, N, S, P] float32
    attended,  # [B, N, S, H]
    num_slots,
    num_splits,
    split_positions,
    NUM_HEADS: tl.constexpr,
    CAPACITY: tl.constexpr,
    H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_SHARE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The output of one query of a row that is split: its splits under the largest score of them all."""
    at_query = tl.program_id(0)
    row = at_query // (NUM_HEADS * num_slots)
    num_live, share = share_of_splits(
        last_seen, row, num_slots, num_splits, split_positions, CAPACITY, BLOCK_S, BLOCK_SHARE
    )
    if share < num_live:
        splits, hs = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_H)
        is_live = splits * share < num_live
        at_split = at_query.to(tl.int64) * num_splits + splits
        largest_of = tl.load(maxima + at_split, mask=is_live, other=LOWEST)
        weights = tl.where(is_live, tl.exp2(largest_of - tl.max(largest_of, axis=0)), 0.0)
        total = tl.sum(weights * tl.load(sums + at_split, mask=is_live, other=0.0), axis=0)
        is_value = is_live[:, None] & (hs < H)[None, :]
        parts = tl.load(accumulators + at_split[:, None] * H + hs[None, :], mask=is_value, other=0.0)
        result = tl.sum(parts * weights[:, None], axis=0) / total
        tl.store(attended + at_query.to(tl.int64) * H + hs, result.to(attended.dtype.element_ty), mask=hs < H)
