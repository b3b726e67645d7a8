# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""RowAttention in OpenAI Triton: attend_split, then combine_splits.

A launch has `num_splits` splits at most, and a split `split_positions` positions or more: launches.py chooses both from
the sizes of the call. What is shared out is what is live of a row and not its capacity, so a row that one split holds
is written by attend_split itself, and combine_splits has nothing to do for it. A program of attend_split holds queries
of all heads that share a key head, slot after slot, so that keys and values are read once and early slots end early; of
a row that is split it leaves (largest score, sum of weights, weighted sum of values) for combine_splits. How a row is
split depends on the sizes of the call and on its own lengths, so its bits do not depend on what the other rows hold.

A tile of positions lies within one page, whose number is looked up once for each tile.

Scores are in bits: exp2 is what the hardware has. Nothing is accumulated with atomics and every sum has a fixed order.

Shape letters: `T` packed tokens, `B` rows, `N` query heads, `K` KV heads, `H` head dim, `P` pages of the pool, `G`
positions of a page, `W` pages of a row, `J` queries of all programs of a launch, `S` splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(
    -1e30
)  # below every score and finite, so that a query that sees nothing of a split gets 0 and no NaN


@triton.jit
def share_of_splits(num_live, num_splits, split_positions, CAPACITY: tl.constexpr, BLOCK_SHARE: tl.constexpr):
    """How many of a row's live positions a split has: a multiple of BLOCK_SHARE. A single split has all positions."""
    share = tl.full([], CAPACITY, tl.int32)
    if num_splits > 1:
        blocks = tl.cdiv(tl.cdiv(num_live, num_splits), BLOCK_SHARE)
        share = tl.maximum(blocks * BLOCK_SHARE, split_positions)
    return share


@triton.jit
def attend_split(
    query,  # [T, N * H]
    pages,  # [P, 2, K, G, H]
    first_tokens,  # [B]
    past_lengths,  # [B]
    query_lengths,  # [B]
    block_tables,  # [B, W]
    accumulators,  # [J * S, H] float32; in a form that is never split: none
    maxima,  # [J * S] float32
    sums,  # [J * S] float32
    attended,  # [T, N * H]
    first_row,
    num_query_blocks,
    num_splits,
    split_positions,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_POSITIONS: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    H: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BLOCK_SHARE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One split of the positions, for one key head of a row and a block of the queries that share it."""
    program, split = tl.program_id(0), tl.program_id(1)
    of_row = program // num_query_blocks  # a key head of a row
    row, kv_head = first_row + of_row // NUM_KV_HEADS, of_row % NUM_KV_HEADS
    num_new = tl.load(query_lengths + row).to(tl.int32)
    past = tl.load(past_lengths + row).to(tl.int32)
    num_live = past + num_new
    share = share_of_splits(num_live, num_splits, split_positions, TABLE_WIDTH * PAGE_POSITIONS, BLOCK_SHARE)
    begin = split * share
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    first_query = program % num_query_blocks * BLOCK_Q
    num_queries = group * num_new
    if (begin < num_live) & (first_query < num_queries):
        queries = first_query + tl.arange(0, BLOCK_Q)  # slot after slot, the heads of a slot side by side
        is_query = queries < num_queries
        slots = queries // group
        limits = tl.where(is_query, past + (slots if IS_CAUSAL else num_new - 1), -1)
        token = tl.load(first_tokens + row) + slots
        at_query = token * (NUM_HEADS * H) + (kv_head * group + queries % group) * H
        hs = tl.arange(0, BLOCK_H)
        is_value = is_query[:, None] & (hs < H)[None, :]
        q = tl.load(query + at_query[:, None] + hs[None, :], mask=is_value, other=0.0)
        of_values: tl.constexpr = NUM_KV_HEADS * PAGE_POSITIONS * H
        largest = tl.zeros([BLOCK_Q], tl.float32) + LOWEST
        total = tl.zeros([BLOCK_Q], tl.float32)
        weighted = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
        # no query of this block sees further; what none of them sees of the split leaves LOWEST behind
        end = tl.minimum(begin + share, tl.max(limits, axis=0) + 1)
        for block in range(begin, end, BLOCK_C):
            page = tl.load(block_tables + row * TABLE_WIDTH + block // PAGE_POSITIONS).to(tl.int64)
            first = page * (2 * of_values) + kv_head * (PAGE_POSITIONS * H)
            positions = block + tl.arange(0, BLOCK_C)
            at = first + (positions % PAGE_POSITIONS)[:, None] * H + hs[None, :]
            is_read = (positions < end)[:, None] & (hs < H)[None, :]  # 0 * NaN would be NaN
            k = tl.load(pages + at, mask=is_read, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (LOG2_E * H**-0.5)
            scores = tl.where(positions[None, :] <= limits[:, None], scores, -float("inf"))
            larger = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - larger[:, None])
            fade = tl.exp2(largest - larger)
            total = total * fade + tl.sum(weights, axis=1)
            v = tl.load(pages + of_values + at, mask=is_read, other=0.0)
            weighted = tl.dot(weights.to(v.dtype), v, weighted * fade[:, None], input_precision="ieee")
            largest = larger
        num_whole = tl.where(share < num_live, 0, num_queries)  # all of them or none
        is_whole = queries < num_whole
        weighted = weighted / tl.where(is_whole, total, 1.0)[:, None]
        is_output = is_whole[:, None] & (hs < H)[None, :]
        tl.store(attended + at_query[:, None] + hs[None, :], weighted.to(attended.dtype.element_ty), mask=is_output)
        if accumulators is not None:
            is_part = is_query & (queries >= num_whole)
            at_split = (program.to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)) * num_splits + split
            tl.store(maxima + at_split, largest, mask=is_part)
            tl.store(sums + at_split, total, mask=is_part)
            at_part = at_split[:, None] * H + hs[None, :]
            tl.store(accumulators + at_part, weighted, mask=is_part[:, None] & (hs < H)[None, :])


@triton.jit
def combine_splits(
    first_tokens,  # [B]
    past_lengths,  # [B]
    query_lengths,  # [B]
    accumulators,  # [J * S, H] float32
    maxima,  # [J * S] float32
    sums,  # [J * S] float32
    attended,  # [T, N * H]
    first_row,
    num_query_blocks,
    block_queries,
    num_splits,
    split_positions,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_POSITIONS: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SHARE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The output of one query of a row that is split: its splits under the largest score of them all."""
    at = tl.program_id(0)  # of the queries of all programs of attend_split
    program = at // block_queries
    of_row = program // num_query_blocks
    row, kv_head = first_row + of_row // NUM_KV_HEADS, of_row % NUM_KV_HEADS
    num_new = tl.load(query_lengths + row).to(tl.int32)
    num_live = tl.load(past_lengths + row).to(tl.int32) + num_new
    share = share_of_splits(num_live, num_splits, split_positions, TABLE_WIDTH * PAGE_POSITIONS, BLOCK_SHARE)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    query = program % num_query_blocks * block_queries + at % block_queries
    if (share < num_live) & (query < group * num_new):
        splits, hs = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_H)
        is_live = splits * share < num_live
        at_split = at.to(tl.int64) * num_splits + splits
        largest_of = tl.load(maxima + at_split, mask=is_live, other=LOWEST)
        weights = tl.where(is_live, tl.exp2(largest_of - tl.max(largest_of, axis=0)), 0.0)
        total = tl.sum(weights * tl.load(sums + at_split, mask=is_live, other=0.0), axis=0)
        is_value = is_live[:, None] & (hs < H)[None, :]
        parts = tl.load(accumulators + at_split[:, None] * H + hs[None, :], mask=is_value, other=0.0)
        result = tl.sum(parts * weights[:, None], axis=0) / total
        token = tl.load(first_tokens + row) + query // group
        at_query = token * (NUM_HEADS * H) + (kv_head * group + query % group) * H
        tl.store(attended + at_query + hs, result.to(attended.dtype.element_ty), mask=hs < H)
