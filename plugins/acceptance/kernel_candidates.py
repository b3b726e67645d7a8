# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""The few tokens of a row that top_k or top_p can keep at all, gathered in a list; and how sampled rows are read.

Shape letters: as in `launches.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspark_trt_plugins.acceptance.kernel import (
    BIN_SHIFT,
    FIRST_BIN,
    INFINITY,
    MASS_UNIT,
    bin_of,
    row_max,
    row_sum,
    weights_of,
)

SURELY = tl.constexpr(1.0 - 1e-6)  # more than float64 rounds


@triton.jit
def gather(
    logits,  # [L, V]
    logit_rows,  # [A]
    temperatures,  # [A]
    top_k,  # [A]
    top_p,  # [A]
    truncated_rows,  # [T]
    segment_max,  # [A, C] float32
    segment_mass,  # [S, C] int64
    bin_counts,  # [T, C, BINS] int32
    num_candidates,  # [T] int32; -1: too many, the row is read whole
    candidate_ids,  # [T, N] int32
    candidate_weights,  # [T, N] float32
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    BINS: tl.constexpr,
):
    """Ids, rising, and weights of the tokens that top_k or top_p can keep: those from some bin of weights on.

    Below it, with top_k, stand none of the k largest; with top_p alone, tokens of at most the mass 1 - top_p, bounded
    by the upper ends of their bins.
    """
    sample = tl.program_id(0)
    segment = tl.program_id(1)
    row = tl.load(truncated_rows + sample)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)  # in the segments before this one
    for other in range(0, NUM_SEGMENTS):
        found = tl.load(bin_counts + (sample * NUM_SEGMENTS + other) * BINS + bins)
        counts += found
        if other < segment:
            before += found
    own = tl.load(bin_counts + (sample * NUM_SEGMENTS + segment) * BINS + bins)
    k = tl.load(top_k + row)
    if (k > 0) & (k < VOCAB):
        at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        first = tl.sum((at_least >= k).to(tl.int32), axis=0) - 1
    else:
        total = row_sum(segment_mass, sample, NUM_SEGMENTS, BLOCK_SEGMENTS).to(tl.float64) / MASS_UNIT
        upper = ((bins + FIRST_BIN + 1) << BIN_SHIFT).to(tl.float32, bitcast=True).to(tl.float64)
        bounds = counts.to(tl.float64) * upper
        below = tl.cumsum(bounds, axis=0) - bounds
        can_go = (1.0 - tl.load(top_p + row).to(tl.float64)) * total * SURELY
        first = tl.maximum(tl.sum((below <= can_go).to(tl.int32), axis=0) - 1, 0)
    is_kept = bins >= first
    num_found = tl.sum(tl.where(is_kept, counts, 0), axis=0)
    if segment == 0:
        tl.store(num_candidates + sample, tl.where(num_found <= NUM_CANDIDATES, num_found, -1))
    num_own = tl.sum(tl.where(is_kept, own, 0), axis=0)
    if (num_found <= NUM_CANDIDATES) & (num_own > 0):
        source = logits + tl.load(logit_rows + row) * VOCAB
        temperature = tl.load(temperatures + row)
        largest = row_max(segment_max, row, NUM_SEGMENTS, BLOCK_SEGMENTS)
        begin = tl.sum(tl.where(is_kept, before, 0), axis=0)
        for offset in range(0, SEGMENT, BLOCK):
            tokens = segment * SEGMENT + offset + tl.arange(0, BLOCK)
            values = tl.load(source + tokens, mask=tokens < VOCAB, other=-INFINITY)
            weights = tl.where(values > -INFINITY, weights_of(values, largest, temperature), 0.0)
            is_candidate = ((tokens < VOCAB) & (bin_of(weights) >= first)).to(tl.int32)
            place = sample.to(tl.int64) * NUM_CANDIDATES + begin + tl.cumsum(is_candidate, axis=0) - is_candidate
            tl.store(candidate_ids + place, tokens, mask=is_candidate == 1)
            tl.store(candidate_weights + place, weights, mask=is_candidate == 1)
            begin += tl.sum(is_candidate, axis=0)


@triton.jit
def row_tokens(
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
    VOCAB: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
):
    """What `load_tokens` takes: the candidates of a sampled row where it has some, else the whole row."""
    num_places = tl.full([], -1, tl.int32)
    if sample < num_truncated:
        num_places = tl.load(num_candidates + sample)
    is_listed = num_places >= 0
    return (
        logits + tl.load(logit_rows + row) * VOCAB,
        row_max(segment_max, row, NUM_SEGMENTS, BLOCK_SEGMENTS),
        tl.load(temperatures + row),
        is_listed,
        tl.where(is_listed, num_places, VOCAB),
        candidate_ids + sample.to(tl.int64) * NUM_CANDIDATES,
        candidate_weights + sample.to(tl.int64) * NUM_CANDIDATES,
    )


@triton.jit
def load_tokens(tokens, places):
    """Ids and weights at some places; weight -1 where there is none."""
    source, largest, temperature, is_listed, num_places, listed_ids, listed_weights = tokens
    is_place = places < num_places
    if is_listed:
        ids = tl.load(listed_ids + places, mask=is_place, other=0)
        weights = tl.load(listed_weights + places, mask=is_place, other=-1.0)
    else:
        ids = places
        values = tl.load(source + places, mask=is_place, other=0.0)
        weights = tl.where(is_place, weights_of(values, largest, temperature), -1.0)
    return ids, weights


@triton.jit
def is_kept(ids, weights, threshold, last_tie):
    """threshold: a weight's bits; of the tokens of this weight those up to the id `last_tie` are kept."""
    bits = weights.to(tl.int32, bitcast=True)
    return (weights >= 0) & ((bits > threshold) | ((bits == threshold) & (ids <= last_tie)))
