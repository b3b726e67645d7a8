# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""Drafting from the top_n base logits of a slot only: W2 is then read at the candidates' rows.

Shape letters: `R` requests, `G` gamma, `V` vocabulary, `r` Markov rank, `C` tiles, `N` top_n.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspark_trt_plugins.markov_head.form import EXCLUDED_LOGIT
from dspark_trt_plugins.markov_head.kernel import finite, previous_ids, summarise

EXCLUDED = tl.constexpr(EXCLUDED_LOGIT)


@triton.jit
def select_candidates(
    base_logits,  # [R, G, V]
    candidates,  # [R, G, N] int32
    draft_logits,  # [R, G, V] float32
    VOCAB: tl.constexpr,
    TOP_N: tl.constexpr,
    BLOCK_SELECT: tl.constexpr,
):
    """The N largest base logits of a slot by rising id, equal ones by lowest id; all draft logits become EXCLUDED.

    A radix search from the highest byte of the logit's bits finds the smallest logit that is taken.
    """
    row = tl.program_id(0).to(tl.int64)
    digits = tl.arange(0, 256)
    num_wanted = TOP_N  # of those that share the bytes found so far
    prefix = 0
    for byte in tl.static_range(3, -1, -1):
        counts = tl.zeros([256], tl.int32)
        for first in range(0, VOCAB, BLOCK_SELECT):
            tokens = first + tl.arange(0, BLOCK_SELECT)
            key = ordered_key(base_logits, row, tokens, VOCAB)
            if byte == 3:
                is_counted = tokens < VOCAB
                values = (key >> 24) + 128  # the sign is in it
            else:
                is_counted = (tokens < VOCAB) & ((key >> (8 * byte + 8)) == prefix)
                values = (key >> (8 * byte)) & 255
            counts += tl.histogram(values, 256, mask=is_counted)
        num_above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
        is_last = (num_above < num_wanted) & (num_above + counts >= num_wanted)
        digit = tl.sum(tl.where(is_last, digits, 0), axis=0)
        num_wanted -= tl.sum(tl.where(is_last, num_above, 0), axis=0)
        prefix = digit - 128 if byte == 3 else prefix * 256 + digit
    num_written = 0
    num_equal = 0
    for first in range(0, VOCAB, BLOCK_SELECT):
        tokens = first + tl.arange(0, BLOCK_SELECT)
        is_token = tokens < VOCAB
        key = ordered_key(base_logits, row, tokens, VOCAB)
        is_equal = (is_token & (key == prefix)).to(tl.int32)
        equal_before = num_equal + tl.cumsum(is_equal, axis=0) - is_equal
        is_taken = is_token & ((key > prefix) | ((is_equal == 1) & (equal_before < num_wanted)))
        taken = is_taken.to(tl.int32)
        place = num_written + tl.cumsum(taken, axis=0) - taken
        tl.store(candidates + row * TOP_N + place, tokens, mask=is_taken)
        tl.store(draft_logits + row * VOCAB + tokens, tl.zeros([BLOCK_SELECT], tl.float32) + EXCLUDED, mask=is_token)
        num_written += tl.sum(taken, axis=0)
        num_equal += tl.sum(is_equal, axis=0)


@triton.jit
def ordered_key(base_logits, row, tokens, VOCAB: tl.constexpr):
    """The logits as int32 of the same order."""
    logits = finite(tl.load(base_logits + row * VOCAB + tokens, mask=tokens < VOCAB, other=0.0).to(tl.float32))
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def candidate_logits(
    base_logits,  # [R, G, V]
    w1,  # [V, r]
    w2,  # [V, r]
    feature,  # [R, r] float32; vanilla: none, W1 itself
    anchor_ids,  # [R]
    draft_ids,  # [R, G]
    temperatures,  # [R]
    candidates,  # [R, G, N] int32
    draft_logits,  # [R, G, V] float32
    tile_max,  # [R, C] float32
    tile_argmax,  # [R, C] int32
    tile_sum,  # [R, C] float32
    slot,
    GAMMA: tl.constexpr,
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    TOP_N: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`tile_logits` where a tile is a run of one request's candidates: only their rows of W2 are read."""
    request = tl.program_id(0)
    tile = tl.program_id(1)
    places = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token = places < TOP_N
    row = request.to(tl.int64) * GAMMA + slot
    tokens = tl.load(candidates + row * TOP_N + places, mask=is_token, other=0)
    at = row * VOCAB + tokens
    base = tl.load(base_logits + at, mask=is_token, other=0.0)
    bias = tl.zeros([BLOCK_V], tl.float32)
    if RANK > 0:
        if feature is None:
            source = w1 + previous_ids(anchor_ids, draft_ids, request, slot, None, GAMMA, VOCAB) * RANK
        else:
            source = feature + request * RANK
        for first in range(0, RANK, BLOCK_K):
            ks = first + tl.arange(0, BLOCK_K)
            is_k = ks < RANK
            is_weight = is_token[:, None] & is_k[None, :]
            w = tl.load(w2 + tokens[:, None].to(tl.int64) * RANK + ks[None, :], mask=is_weight, other=0.0)
            f = tl.load(source + ks, mask=is_k, other=0.0)
            bias += tl.sum(w.to(tl.float32) * f.to(tl.float32)[None, :], axis=1)
    logits = finite(base.to(tl.float32) + bias)
    tl.store(draft_logits + at, logits, mask=is_token)
    requests = request + tl.arange(0, 1)
    summarise(
        tl.where(is_token, logits, -float("inf"))[:, None],
        temperatures,
        tile_max,
        tile_argmax,
        tile_sum,
        requests,
        requests >= 0,
        tile,
        NUM_TILES,
        BLOCK_V,
    )
