# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""Log probabilities: the raw log-softmax of the token of a row, and of the most probable ones.

Shape letters: as in `launches.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspark_trt_plugins.acceptance.kernel import INFINITY


@triton.jit
def rank(
    logits,  # [L, V]
    logit_rows,  # [A]
    reported_rows,  # [P]
    block_max,  # [P, blocks] float32
    block_sum,  # [P, blocks] float32
    block_top,  # [P, blocks, MAX_TOP] float32
    block_top_ids,  # [P, blocks, MAX_TOP] int32
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    MAX_TOP: tl.constexpr,
):
    """Of one block of a row, before it is edited: what the log-softmax needs, and the largest logits, ties by id."""
    reported = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.load(reported_rows + reported)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    source = logits + tl.load(logit_rows + row) * VOCAB
    values = tl.load(source + tokens, mask=tokens < VOCAB, other=-INFINITY)
    largest = tl.max(values, axis=0)
    at = reported * NUM_BLOCKS + block
    tl.store(block_max + at, largest)
    tl.store(block_sum + at, tl.sum(tl.exp(values - largest), axis=0))
    for place in range(0, MAX_TOP):
        best = tl.max(values, axis=0)
        token = tl.min(tl.where(values == best, tokens, VOCAB), axis=0)
        tl.store(block_top + at * MAX_TOP + place, best)
        tl.store(block_top_ids + at * MAX_TOP + place, token)
        values = tl.where(tokens == token, -INFINITY, values)


@triton.jit
def report(
    logits,  # [L, V]
    logit_rows,  # [A]
    draft_ids,  # [A]
    reported_rows,  # [P]
    outcomes,  # [A]
    block_max,  # [P, blocks] float32
    block_sum,  # [P, blocks] float32
    block_top,  # [P, blocks, MAX_TOP] float32
    block_top_ids,  # [P, blocks, MAX_TOP] int32
    log_probs,  # [P]
    top_ids,  # [P, MAX_TOP]
    top_log_probs,  # [P, MAX_TOP]
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    MAX_TOP: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    """Of a row whose outcome is no token, zeros are reported for the token."""
    reported = tl.program_id(0)
    row = tl.load(reported_rows + reported)
    blocks = tl.arange(0, BLOCK_BLOCKS)
    is_block = blocks < NUM_BLOCKS
    of_blocks = tl.load(block_max + reported * NUM_BLOCKS + blocks, mask=is_block, other=-INFINITY)
    sums = tl.load(block_sum + reported * NUM_BLOCKS + blocks, mask=is_block, other=0.0)
    largest = tl.max(of_blocks, axis=0)
    total = largest + tl.log(tl.sum(tl.where(is_block, tl.exp(of_blocks - largest) * sums, 0.0), axis=0))
    outcome = tl.load(outcomes + row)
    token = tl.where(outcome == -1, tl.load(draft_ids + row), outcome)
    raw = tl.load(logits + tl.load(logit_rows + row) * VOCAB + token, mask=token >= 0, other=0.0)
    tl.store(log_probs + reported, tl.where(token >= 0, raw - total, 0.0))
    places = tl.arange(0, BLOCK_TOP)
    at = (reported * NUM_BLOCKS + blocks)[:, None] * MAX_TOP + places[None, :]
    is_found = is_block[:, None] & (places < MAX_TOP)[None, :]
    values = tl.load(block_top + at, mask=is_found, other=-INFINITY)
    ids = tl.load(block_top_ids + at, mask=is_found, other=VOCAB)
    for place in range(0, MAX_TOP):
        best = tl.max(tl.max(values, axis=1), axis=0)
        best_id = tl.min(tl.min(tl.where(values == best, ids, VOCAB), axis=1), axis=0)
        tl.store(top_ids + reported * MAX_TOP + place, best_id.to(tl.int64))
        tl.store(top_log_probs + reported * MAX_TOP + place, best - total)
        values = tl.where(ids == best_id, -INFINITY, values)
