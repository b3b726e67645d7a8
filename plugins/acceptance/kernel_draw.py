# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""The token that ends a block: drawn from the target's distribution, or from the residual behind a rejection.

Shape letters: as in `launches.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspark_trt_plugins.acceptance.form import PROB_BITS, RESIDUAL_MASS_EPSILON
from dspark_trt_plugins.acceptance.kernel import MASS_UNIT, find
from dspark_trt_plugins.acceptance.kernel_candidates import is_kept, load_tokens, row_tokens
from dspark_trt_plugins.acceptance.kernel_decision import (
    BROKEN,
    EMPTY,
    END,
    KEPT,
    REJECTED,
    argmax_of,
    draft_distribution,
    draft_probs,
    uniform_of,
)

PROB_UNIT = tl.constexpr(float(1 << PROB_BITS))
LEAST_RESIDUAL = tl.constexpr(int(RESIDUAL_MASS_EPSILON * (1 << PROB_BITS)))


@triton.jit
def is_reached(verdicts, first_rows, row, BLOCK_SLOTS: tl.constexpr):
    """Whether every draft before this row's slot was accepted."""
    rows = tl.load(first_rows + row) + tl.arange(0, BLOCK_SLOTS)
    before = tl.load(verdicts + rows, mask=rows < row, other=1)
    return tl.sum((before != KEPT).to(tl.int32), axis=0) == 0


@triton.jit
def probs_of(tokens, drafting, border, places, is_rejected):
    """Ids at some places, and p_t and max(p_t - p_d, 0) of them as integers; p_d is 0 without a rejection."""
    threshold, last_tie, mass = border
    ids, weights = load_tokens(tokens, places)
    kept = is_kept(ids, weights, threshold, last_tie)
    p_t = tl.where(kept, weights.to(tl.float64) * MASS_UNIT / mass.to(tl.float64), 0.0)
    excess = p_t
    if is_rejected:
        excess = tl.maximum(p_t - draft_probs(drafting, ids, kept), 0.0)
    return ids, (p_t * PROB_UNIT).to(tl.int64), (excess * PROB_UNIT).to(tl.int64)


@triton.jit
def measure(
    logits,  # [L, V]
    logit_rows,  # [A]
    draft_logits,  # [D, W]
    draft_columns,  # [V]
    draft_rows,  # [A]
    draft_ids,  # [A]
    draws,  # [A]
    first_rows,  # [A]
    temperatures,  # [A]
    draft_temperatures,  # [A]
    sampled_rows,  # [S]
    segment_max,  # [A, C] float32
    draft_max,  # [X, C] float32
    draft_mass,  # [X, C] int64
    num_candidates,  # [T] int32
    candidate_ids,  # [T, N] int32
    candidate_weights,  # [T, N] float32
    thresholds,  # [S] int32
    last_ties,  # [S] int32
    kept_mass,  # [S] int64
    verdicts,  # [A] int32
    target_mass,  # [S, C] int64
    residual_mass,  # [S, C] int64
    num_truncated,
    VOCAB: tl.constexpr,
    DRAFT_VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    NUM_DRAFT_SEGMENTS: tl.constexpr,
    BLOCK_DRAFT_SEGMENTS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """Where a block ends: the mass of a segment, of the target's distribution and of the residual."""
    sample = tl.program_id(0)
    begin = tl.program_id(1) * SEGMENT
    row = tl.load(sampled_rows + sample)
    verdict = tl.load(verdicts + row)
    is_end = (verdict == END) | (verdict == REJECTED)
    if is_end & is_reached(verdicts, first_rows, row, BLOCK_SLOTS):
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
        drafting = draft_distribution(
            draft_logits,
            draft_columns,
            draft_rows,
            draft_ids,
            draws,
            draft_temperatures,
            draft_max,
            draft_mass,
            row,
            DRAFT_VOCAB,
            NUM_DRAFT_SEGMENTS,
            BLOCK_DRAFT_SEGMENTS,
        )
        border = (tl.load(thresholds + sample), tl.load(last_ties + sample), tl.load(kept_mass + sample))
        of_target = tl.zeros([BLOCK], tl.int64)
        of_residual = tl.zeros([BLOCK], tl.int64)
        for offset in range(begin, tl.minimum(begin + SEGMENT, tokens[4]), BLOCK):
            places = offset + tl.arange(0, BLOCK)
            _, p_t, excess = probs_of(tokens, drafting, border, places, verdict == REJECTED)
            of_target += p_t
            of_residual += excess
        at = sample * NUM_SEGMENTS + tl.program_id(1)
        tl.store(target_mass + at, tl.sum(of_target, axis=0))
        tl.store(residual_mass + at, tl.sum(of_residual, axis=0))


@triton.jit
def choose(
    logits,  # [L, V]
    logit_rows,  # [A]
    draft_logits,  # [D, W]
    draft_columns,  # [V]
    draft_rows,  # [A]
    draft_ids,  # [A]
    draws,  # [A]
    samples,  # [A]
    first_rows,  # [A]
    residual_words,  # [A]
    bonus_words,  # [A]
    temperatures,  # [A]
    draft_temperatures,  # [A]
    segment_max,  # [A, C] float32
    segment_argmax,  # [A, C] int32
    draft_max,  # [X, C] float32
    draft_mass,  # [X, C] int64
    num_candidates,  # [T] int32
    candidate_ids,  # [T, N] int32
    candidate_weights,  # [T, N] float32
    thresholds,  # [S] int32
    last_ties,  # [S] int32
    kept_mass,  # [S] int64
    verdicts,  # [A] int32
    target_mass,  # [S, C] int64
    residual_mass,  # [S, C] int64
    outcomes,  # [A] int64
    num_truncated,
    VOCAB: tl.constexpr,
    DRAFT_VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    NUM_DRAFT_SEGMENTS: tl.constexpr,
    BLOCK_DRAFT_SEGMENTS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """What becomes of a row: accepted, failed, not reached, or the token that ends its block."""
    row = tl.program_id(0)
    sample = tl.load(samples + row)
    verdict = tl.load(verdicts + row)
    outcome = tl.full([], -1, tl.int64)  # accepted
    if is_reached(verdicts, first_rows, row, BLOCK_SLOTS) == 0:
        outcome -= 3
    elif verdict == BROKEN:
        outcome -= 1
    elif verdict == EMPTY:
        outcome -= 2
    elif (verdict != KEPT) & (sample < 0):
        token = argmax_of(segment_max, segment_argmax, row, VOCAB, NUM_SEGMENTS, BLOCK_SEGMENTS)
        outcome = token.to(tl.int64)
    elif verdict != KEPT:
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
        drafting = draft_distribution(
            draft_logits,
            draft_columns,
            draft_rows,
            draft_ids,
            draws,
            draft_temperatures,
            draft_max,
            draft_mass,
            row,
            DRAFT_VOCAB,
            NUM_DRAFT_SEGMENTS,
            BLOCK_DRAFT_SEGMENTS,
        )
        border = (tl.load(thresholds + sample), tl.load(last_ties + sample), tl.load(kept_mass + sample))
        segments = tl.arange(0, BLOCK_SEGMENTS)
        at = sample * NUM_SEGMENTS + segments
        is_segment = segments < NUM_SEGMENTS
        masses = tl.load(target_mass + at, mask=is_segment, other=0)
        excesses = tl.load(residual_mass + at, mask=is_segment, other=0)
        uniform = tl.where(verdict == REJECTED, uniform_of(residual_words, row), uniform_of(bonus_words, row))
        is_residual = (verdict == REJECTED) & (tl.sum(excesses, axis=0) > LEAST_RESIDUAL)
        masses = tl.where(is_residual, excesses, masses)
        whole = tl.sum(masses, axis=0)
        position = tl.minimum((uniform * whole.to(tl.float64)).to(tl.int64), whole - 1)
        segment, position = find(masses, position, segments)
        outcome += 1
        begin = segment * SEGMENT
        for offset in range(begin, tl.minimum(begin + SEGMENT, tokens[4]), BLOCK):
            indices = tl.arange(0, BLOCK)
            if position >= 0:  # not found yet
                ids, p_t, excess = probs_of(tokens, drafting, border, offset + indices, is_residual)
                of_block = tl.where(is_residual, excess, p_t)
                index, _ = find(of_block, position, indices)
                outcome += tl.sum(tl.where(indices == index, ids, 0), axis=0)  # none where it is not in this block
                position -= tl.sum(of_block, axis=0)
    tl.store(outcomes + row, outcome)
