# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""The border of what top_k, top_p and min_p keep of a row.

Nothing is sorted. Weights are not negative, so their bits are ordered as they are, and the border is found bit by bit:
the largest value above which, itself included, there are top_k tokens, or there is a mass of top_p.

Shape letters: as in `launches.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspark_trt_plugins.acceptance.kernel import as_mass, row_sum
from dspark_trt_plugins.acceptance.kernel_candidates import is_kept, load_tokens, row_tokens


@triton.jit
def find_border(tokens, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest weight, as bits, so that the weights from it on have at least the mass or number `wanted`."""
    num_places = tokens[4]
    border = tl.zeros([], tl.int32)
    for step in range(0, 30):  # weights are at most 1, 0x3F800000
        trial = border | (1 << (29 - step))
        sums = tl.zeros([BLOCK], tl.int64)
        for first in range(0, num_places, BLOCK):
            _, weights = load_tokens(tokens, first + tl.arange(0, BLOCK))
            is_above = weights.to(tl.int32, bitcast=True) >= trial
            if BY_MASS:
                sums += tl.where(is_above, as_mass(weights), 0)
            else:
                sums += is_above.to(tl.int64)
        border = tl.where(tl.sum(sums, axis=0) >= wanted, trial, border)
    return border


@triton.jit
def sums_at(tokens, threshold, last_tie, BLOCK: tl.constexpr):
    """Mass of what is kept, mass above the threshold, and the number of tokens at it."""
    num_places = tokens[4]
    kept = tl.zeros([BLOCK], tl.int64)
    above = tl.zeros([BLOCK], tl.int64)
    ties = tl.zeros([BLOCK], tl.int64)
    for first in range(0, num_places, BLOCK):
        ids, weights = load_tokens(tokens, first + tl.arange(0, BLOCK))
        bits = weights.to(tl.int32, bitcast=True)
        masses = as_mass(weights)
        kept += tl.where(is_kept(ids, weights, threshold, last_tie), masses, 0)
        above += tl.where(bits > threshold, masses, 0)
        ties += (bits == threshold).to(tl.int64)
    return tl.sum(kept, axis=0), tl.sum(above, axis=0), tl.sum(ties, axis=0)


@triton.jit
def id_of_tie(tokens, threshold, number, BLOCK: tl.constexpr):
    """The id of the `number`-th token whose weight is the threshold."""
    num_places = tokens[4]
    found = tl.zeros([], tl.int32)
    num_before = tl.zeros([], tl.int64)
    for first in range(0, num_places, BLOCK):
        ids, weights = load_tokens(tokens, first + tl.arange(0, BLOCK))
        is_tie = (weights.to(tl.int32, bitcast=True) == threshold).to(tl.int64)
        rank = num_before + tl.cumsum(is_tie, axis=0)
        found += tl.sum(tl.where((is_tie == 1) & (rank == number), ids, 0), axis=0)
        num_before += tl.sum(is_tie, axis=0)
    return found


@triton.jit
def cut(
    logits,  # [L, V]
    logit_rows,  # [A]
    temperatures,  # [A]
    top_k,  # [A]
    top_p,  # [A]
    min_p,  # [A]
    truncated_rows,  # [T]
    segment_max,  # [A, C] float32
    segment_mass,  # [S, C] int64
    num_candidates,  # [T] int32
    candidate_ids,  # [T, N] int32
    candidate_weights,  # [T, N] float32
    thresholds,  # [S] int32
    last_ties,  # [S] int32
    kept_mass,  # [S] int64
    num_truncated,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
):
    """Of one row with top_k or top_p: the least weight that is kept, up to which id, and the mass of all that is."""
    sample = tl.program_id(0)
    row = tl.load(truncated_rows + sample)
    tokens = row_tokens(
        logits,
        logit_rows,
        temperatures,
        segment_max,
        num_candidates,
        candidate_ids,
        candidate_weights,
        row,
        sample,
        num_truncated,
        VOCAB,
        NUM_SEGMENTS,
        BLOCK_SEGMENTS,
        NUM_CANDIDATES,
    )
    k = tl.load(top_k + row)
    share = tl.load(top_p + row)
    mass = row_sum(segment_mass, sample, NUM_SEGMENTS, BLOCK_SEGMENTS)
    border = tl.zeros([], tl.int32)
    threshold = tl.load(min_p + row).to(tl.int32, bitcast=True)
    last_tie = tl.full([], VOCAB, tl.int32)
    if (k > 0) & (k < VOCAB):
        border = find_border(tokens, k, False, BLOCK)
        mass, _, _ = sums_at(tokens, border, last_tie, BLOCK)
    if share < 1.0:
        wanted = tl.ceil(share.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
        wanted = tl.minimum(tl.maximum(wanted, 1), mass)
        border = find_border(tokens, wanted, True, BLOCK)
        _, above, num_ties = sums_at(tokens, border, last_tie, BLOCK)
        of_tie = as_mass(border.to(tl.float32, bitcast=True))
        missing = wanted - above
        num_kept = (missing.to(tl.float64) / of_tie.to(tl.float64)).to(tl.int64)  # rounded up, once it is exact
        num_kept = tl.where(num_kept * of_tie < missing, num_kept + 1, num_kept)
        num_kept = tl.where((num_kept - 1) * of_tie >= missing, num_kept - 1, num_kept)
        if (num_kept < num_ties) & (border >= threshold):
            last_tie = id_of_tie(tokens, border, num_kept, BLOCK)
    threshold = tl.maximum(threshold, border)
    mass, _, _ = sums_at(tokens, threshold, last_tie, BLOCK)
    tl.store(thresholds + sample, threshold)
    tl.store(last_ties + sample, last_tie)
    tl.store(kept_mass + sample, mass)
