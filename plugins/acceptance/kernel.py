# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""Acceptance in OpenAI Triton: largest logits and sums of weights. `launches.py` says in which order kernels run.

A program works on one segment of the vocabulary of one row. The weight of a token is exp((logit - largest) /
temperature); weights are summed as integers (multiples of 2^-44 of the largest), which makes every sum exact: it does
not depend on its order, and a token without weight is never drawn.

Shape letters: as in `launches.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspark_trt_plugins.acceptance.form import MASS_BITS

MASS_UNIT = tl.constexpr(float(1 << MASS_BITS))
INFINITY = tl.constexpr(float("inf"))
BIN_SHIFT = tl.constexpr(21)  # two bits of the mantissa are left
FIRST_BIN = tl.constexpr((0x3F800000 >> 21) - 255)  # the bin of weight 1 is the last, 255


@triton.jit
def as_mass(weights):
    """Weights from 0 to 1 as integers."""
    return (weights.to(tl.float64) * MASS_UNIT).to(tl.int64)


@triton.jit
def weights_of(logits, largest, temperature):
    return tl.exp((logits - largest) / temperature)


@triton.jit
def bin_of(weights):
    bits = weights.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits >> BIN_SHIFT) - FIRST_BIN, 0), 255)


@triton.jit
def row_max(of_segments, row, NUM_SEGMENTS: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr):
    segments = tl.arange(0, BLOCK_SEGMENTS)
    is_segment = segments < NUM_SEGMENTS
    return tl.max(tl.load(of_segments + row * NUM_SEGMENTS + segments, mask=is_segment, other=-INFINITY), axis=0)


@triton.jit
def row_sum(of_segments, row, NUM_SEGMENTS: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr):
    segments = tl.arange(0, BLOCK_SEGMENTS)
    return tl.sum(tl.load(of_segments + row * NUM_SEGMENTS + segments, mask=segments < NUM_SEGMENTS, other=0), axis=0)


@triton.jit
def find(masses, position, indices):
    """The first index whose cumulative mass exceeds `position`, and what of it is left there."""
    cumulative = tl.cumsum(masses, axis=0)
    index = tl.sum((cumulative <= position).to(tl.int32), axis=0)
    return index, position - tl.sum(tl.where(indices < index, masses, 0), axis=0)


@triton.jit
def summarise(
    logits,  # [L, V]
    logit_rows,  # [A]
    segment_max,  # [A, C] float32
    segment_argmax,  # [A, C] int32
    segment_bad,  # [A, C] int32
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
):
    """The largest logit of a segment, its place (the lowest of equals), and whether one is not finite."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    source = logits + tl.load(logit_rows + row) * VOCAB
    largest = tl.full([BLOCK], -INFINITY, tl.float32)
    places = tl.full([BLOCK], VOCAB, tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for offset in range(0, SEGMENT, BLOCK):
        tokens = segment * SEGMENT + offset + tl.arange(0, BLOCK)
        values = tl.load(source + tokens, mask=tokens < VOCAB, other=-INFINITY)
        bad = bad | tl.where((tl.abs(values) < INFINITY) | (tokens >= VOCAB), 0, 1)
        is_larger = values > largest
        places = tl.where(is_larger, tokens, places)
        largest = tl.where(is_larger, values, largest)
    best = tl.max(largest, axis=0)
    at = row * NUM_SEGMENTS + segment
    tl.store(segment_max + at, best)
    tl.store(segment_argmax + at, tl.min(tl.where(largest == best, places, VOCAB), axis=0))
    tl.store(segment_bad + at, tl.max(bad, axis=0))


@triton.jit
def summarise_drafts(
    draft_logits,  # [D, W]
    draft_rows,  # [A]
    drawn_rows,  # [X]
    draft_max,  # [X, C] float32
    draft_bad,  # [X, C] int32
    DRAFT_VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_DRAFT_SEGMENTS: tl.constexpr,
):
    """The same of draft logits, among which -inf is no fault."""
    drawn = tl.program_id(0)
    segment = tl.program_id(1)
    source = draft_logits + tl.load(draft_rows + tl.load(drawn_rows + drawn)) * DRAFT_VOCAB
    largest = tl.full([BLOCK], -INFINITY, tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for offset in range(0, SEGMENT, BLOCK):
        columns = segment * SEGMENT + offset + tl.arange(0, BLOCK)
        values = tl.load(source + columns, mask=columns < DRAFT_VOCAB, other=-INFINITY)
        is_usable = values < INFINITY  # neither NaN nor inf
        bad = bad | tl.where(is_usable, 0, 1)
        largest = tl.where(is_usable, tl.maximum(largest, values), largest)
    at = drawn * NUM_DRAFT_SEGMENTS + segment
    tl.store(draft_max + at, tl.max(largest, axis=0))
    tl.store(draft_bad + at, tl.max(bad, axis=0))


@triton.jit
def weigh_drafts(
    draft_logits,  # [D, W]
    draft_rows,  # [A]
    draft_temperatures,  # [A]
    drawn_rows,  # [X]
    draft_max,  # [X, C] float32
    draft_mass,  # [X, C] int64
    DRAFT_VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_DRAFT_SEGMENTS: tl.constexpr,
    BLOCK_DRAFT_SEGMENTS: tl.constexpr,
):
    """The sum of a segment's weights, of what a draft was drawn from."""
    drawn = tl.program_id(0)
    segment = tl.program_id(1)
    row = tl.load(drawn_rows + drawn)
    source = draft_logits + tl.load(draft_rows + row) * DRAFT_VOCAB
    temperature = tl.load(draft_temperatures + row)
    largest = row_max(draft_max, drawn, NUM_DRAFT_SEGMENTS, BLOCK_DRAFT_SEGMENTS)
    masses = tl.zeros([BLOCK], tl.int64)
    if largest > -INFINITY:
        for offset in range(0, SEGMENT, BLOCK):
            columns = segment * SEGMENT + offset + tl.arange(0, BLOCK)
            values = tl.load(source + columns, mask=columns < DRAFT_VOCAB, other=-INFINITY)
            values = tl.where(values < INFINITY, values, -INFINITY)
            masses += as_mass(weights_of(values, largest, temperature))
    tl.store(draft_mass + drawn * NUM_DRAFT_SEGMENTS + segment, tl.sum(masses, axis=0))


@triton.jit
def weigh(
    logits,  # [L, V]
    logit_rows,  # [A]
    temperatures,  # [A]
    min_p,  # [A]
    sampled_rows,  # [S]
    segment_max,  # [A, C] float32
    segment_mass,  # [S, C] int64
    bin_counts,  # [T, C, BINS] int32
    num_truncated,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    BINS: tl.constexpr,
):
    """The sum of a segment's weights; with top_k or top_p to come also how many weights lie in which quarter octave,
    without them of those weights that min_p keeps."""
    sample = tl.program_id(0)
    segment = tl.program_id(1)
    row = tl.load(sampled_rows + sample)
    source = logits + tl.load(logit_rows + row) * VOCAB
    temperature = tl.load(temperatures + row)
    largest = row_max(segment_max, row, NUM_SEGMENTS, BLOCK_SEGMENTS)
    is_truncated = sample < num_truncated
    least = tl.load(min_p + row)
    if is_truncated:
        least = 0.0
    masses = tl.zeros([BLOCK], tl.int64)
    counts = tl.zeros([BINS], tl.int32)
    for offset in range(0, SEGMENT, BLOCK):
        tokens = segment * SEGMENT + offset + tl.arange(0, BLOCK)
        is_token = tokens < VOCAB
        values = tl.load(source + tokens, mask=is_token, other=-INFINITY)
        weights = tl.where(values > -INFINITY, weights_of(values, largest, temperature), 0.0)
        masses += tl.where(weights >= least, as_mass(weights), 0)
        if is_truncated:
            counts += tl.histogram(bin_of(weights), BINS, mask=is_token)
    tl.store(segment_mass + sample * NUM_SEGMENTS + segment, tl.sum(masses, axis=0))
    if is_truncated:
        tl.store(bin_counts + (sample * NUM_SEGMENTS + segment) * BINS + tl.arange(0, BINS), counts)
