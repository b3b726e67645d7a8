# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""PrefixSelect in OpenAI Triton: measure_survival, rank_drafts, admit_drafts, pack_tokens and pack_rows, in this order.

Survivals are float64 and ordered as the integers that their bits make.

Drafts are numbered by (j, r), the order in which ties are broken. Shape letters: `R` requests, `G` gamma, `T` packed
tokens, `B` KV rows of the target's row group.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
NOT_OFFERED = tl.constexpr(-1)  # the key of a draft beyond its request's cap, and of a forced one


@triton.jit
def measure_survival(
    confidence_logits,  # [R, G]
    temperatures,  # [G]
    caps,  # [R]
    is_forced,  # [R]
    keys,  # [G, R] int64: bits of the survival
    num_requests,
    GAMMA: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Running product of sigmoid(logit / temperature); 0 from a non-finite confidence on."""
    requests = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_request = requests < num_requests
    cap = tl.load(caps + requests, mask=is_request, other=0)
    forced = tl.load(is_forced + requests, mask=is_request, other=0) != 0
    survival = tl.zeros([BLOCK_R], tl.float64) + 1.0
    for draft in range(GAMMA):
        logit = tl.load(confidence_logits + requests * GAMMA + draft, mask=is_request, other=0.0)
        is_finite = tl.abs(logit) <= LARGEST_FLOAT
        tempered = tl.where(is_finite, logit, 0.0).to(tl.float64) / tl.load(temperatures + draft).to(tl.float64)
        survival *= tl.where(is_finite, 1.0 / (1.0 + tl.exp(-tempered)), 0.0)
        key = tl.where((draft < cap) & (forced == 0), survival.to(tl.int64, bitcast=True), NOT_OFFERED)
        tl.store(keys + draft * num_requests + requests, key, mask=is_request)


@triton.jit
def rank_drafts(
    keys,  # [G, R]
    ranks,  # [G, R] int32
    num_requests,
    GAMMA: tl.constexpr,
    BLOCK_DRAFTS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
):
    """How many drafts stand before each one: those of greater survival, and the equal ones of a lower number."""
    num_drafts = GAMMA * num_requests
    drafts = tl.program_id(0) * BLOCK_DRAFTS + tl.arange(0, BLOCK_DRAFTS)
    is_draft = drafts < num_drafts
    key = tl.load(keys + drafts, mask=is_draft, other=NOT_OFFERED)
    rank = tl.zeros([BLOCK_DRAFTS], tl.int32)
    for first in range(0, num_drafts, BLOCK_OTHERS):
        others = first + tl.arange(0, BLOCK_OTHERS)
        other = tl.load(keys + others, mask=others < num_drafts, other=NOT_OFFERED)
        is_before = other[None, :] > key[:, None]
        is_before |= (other[None, :] == key[:, None]) & (others[None, :] < drafts[:, None])
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(ranks + drafts, rank, mask=is_draft)


@triton.jit
def admit_drafts(
    caps,  # [R]
    is_forced,  # [R]
    keys,  # [G, R]
    ranks,  # [G, R]
    num_admitted,  # [1]
    verify_len,  # [R] int64
    first_tokens,  # [R] int64
    num_tokens,  # [1] int64
    num_requests,
    GAMMA: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """What each request gets of the drafts that are admitted. One program."""
    admitted = tl.load(num_admitted)
    begin = tl.full([], 0, tl.int64)
    for start in range(0, num_requests, BLOCK_R):
        requests = start + tl.arange(0, BLOCK_R)
        is_request = requests < num_requests
        forced = tl.load(is_forced + requests, mask=is_request, other=0) != 0
        cap = tl.load(caps + requests, mask=is_request, other=-1)
        length = tl.where(forced & (cap > 0), cap, 0)
        for draft in range(GAMMA):
            at = draft * num_requests + requests
            is_offered = tl.load(keys + at, mask=is_request, other=NOT_OFFERED) != NOT_OFFERED
            rank = tl.load(ranks + at, mask=is_request, other=0)
            length += (is_offered & (rank.to(tl.int64) < admitted)).to(tl.int64)
        tokens = tl.where(cap >= 0, length + 1, 0)  # a padding request has none, not even an anchor
        tl.store(verify_len + requests, length, mask=is_request)
        tl.store(first_tokens + requests, begin + tl.cumsum(tokens, axis=0) - tokens, mask=is_request)
        begin += tl.sum(tokens, axis=0)
    tl.store(num_tokens, begin)


@triton.jit
def pack_tokens(
    first_tokens,  # [R]
    num_tokens,  # [1]
    anchor_ids,  # [R]
    draft_ids,  # [R, G]
    past_lengths,  # [R]
    block_rows,  # [R]
    token_index,  # [T]
    token_requests,  # [T] int64
    token_ids,  # [T] int64
    positions,  # [T] int64
    padded_indices,  # [T] int64
    num_requests,
    num_packed,
    GAMMA: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_PACK: tl.constexpr,
):
    """What stands at each packed token; behind the last one, that one again."""
    items = tl.program_id(0) * BLOCK_PACK + tl.arange(0, BLOCK_PACK)
    is_item = items < num_packed
    token = tl.minimum(tl.load(token_index + items, mask=is_item, other=0), tl.load(num_tokens) - 1)
    num_begun = tl.zeros([BLOCK_PACK], tl.int32)
    for start in range(0, num_requests, BLOCK_R):
        requests = start + tl.arange(0, BLOCK_R)
        begins = tl.load(first_tokens + requests, mask=requests < num_requests, other=0)
        has_begun = (begins[None, :] <= token[:, None]) & (requests[None, :] < num_requests)
        num_begun += tl.sum(has_begun.to(tl.int32), axis=1)
    request = num_begun - 1
    slot = token - tl.load(first_tokens + request, mask=is_item, other=0)
    anchor = tl.load(anchor_ids + request, mask=is_item & (slot == 0), other=0)
    draft = tl.load(draft_ids + request * GAMMA + slot - 1, mask=is_item & (slot > 0), other=0)
    position = tl.load(past_lengths + request, mask=is_item, other=0) + slot
    row = tl.load(block_rows + request, mask=is_item, other=0)
    tl.store(token_requests + items, request.to(tl.int64), mask=is_item)
    tl.store(token_ids + items, anchor + draft, mask=is_item)
    tl.store(positions + items, position, mask=is_item)
    tl.store(padded_indices + items, row * (GAMMA + 1) + slot, mask=is_item)


@triton.jit
def pack_rows(
    verify_len,  # [R]
    first_tokens,  # [R]
    past_lengths,  # [R]
    row_requests,  # [B]
    row_query_lengths,  # [B]
    group_tokens,  # [B, G + 1] int64
    group_past_lengths,  # [B] int64
    group_query_lengths,  # [B] int64
    num_rows,
    GAMMA: tl.constexpr,
    BLOCK_PACK: tl.constexpr,
):
    """The target's row group: padding points at the row's last token, in a row without request at token 0."""
    rows = tl.program_id(0) * BLOCK_PACK + tl.arange(0, BLOCK_PACK)
    is_row = rows < num_rows
    is_used = is_row & (tl.load(row_query_lengths + rows, mask=is_row, other=0) > 0)
    request = tl.load(row_requests + rows, mask=is_used, other=0)
    length = tl.load(verify_len + request, mask=is_used, other=0)
    begin = tl.load(first_tokens + request, mask=is_used, other=0)
    tl.store(group_past_lengths + rows, tl.load(past_lengths + request, mask=is_used, other=0), mask=is_row)
    tl.store(group_query_lengths + rows, tl.where(is_used, length + 1, 0), mask=is_row)
    for slot in range(GAMMA + 1):
        tl.store(group_tokens + rows * (GAMMA + 1) + slot, begin + tl.minimum(length, slot), mask=is_row)
