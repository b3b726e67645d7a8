# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""Whether a draft is accepted: p_t and p_d of it, against a uniform.

Shape letters: as in `launches.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspark_trt_plugins.acceptance.form import MASKED_LOGIT
from dspark_trt_plugins.acceptance.kernel import INFINITY, MASS_UNIT, row_max, row_sum, weights_of
from dspark_trt_plugins.acceptance.kernel_candidates import is_kept

MASKED = tl.constexpr(MASKED_LOGIT)
# verdicts on a row
END = tl.constexpr(0)  # the block ends here, or nothing that counts was drafted: a token of the target
KEPT = tl.constexpr(1)  # the draft is accepted
REJECTED = tl.constexpr(2)
BROKEN = tl.constexpr(3)  # logits that are not finite
EMPTY = tl.constexpr(4)  # every token is masked


@triton.jit
def uniform_of(words, row):
    """[0, 1) with 52 bits, as runtime/rng.py makes it."""
    bits = (tl.load(words + row) >> 12) & 0xFFFFFFFFFFFFF
    return bits.to(tl.float64) * 2.220446049250313e-16


@triton.jit
def argmax_of(
    segment_max,
    segment_argmax,
    row,
    VOCAB: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
):
    segments = tl.arange(0, BLOCK_SEGMENTS)
    is_segment = segments < NUM_SEGMENTS
    largest = tl.load(segment_max + row * NUM_SEGMENTS + segments, mask=is_segment, other=-INFINITY)
    places = tl.load(segment_argmax + row * NUM_SEGMENTS + segments, mask=is_segment, other=VOCAB)
    return tl.min(tl.where(largest == tl.max(largest, axis=0), places, VOCAB), axis=0)


@triton.jit
def draft_distribution(
    draft_logits,
    draft_columns,
    draft_rows,
    draft_ids,
    draws,
    draft_temperatures,
    draft_max,
    draft_mass,
    row,
    DRAFT_VOCAB: tl.constexpr,
    NUM_DRAFT_SEGMENTS: tl.constexpr,
    BLOCK_DRAFT_SEGMENTS: tl.constexpr,
):
    """What `draft_probs` takes: of a draft that was drawn, its logits and the sum of their weights."""
    drawn = tl.load(draws + row)
    largest = tl.zeros([], tl.float32)
    whole = tl.full([], 1, tl.int64)
    if drawn >= 0:
        largest = row_max(draft_max, drawn, NUM_DRAFT_SEGMENTS, BLOCK_DRAFT_SEGMENTS)
        whole = row_sum(draft_mass, drawn, NUM_DRAFT_SEGMENTS, BLOCK_DRAFT_SEGMENTS)
    source = draft_logits + tl.load(draft_rows + row) * DRAFT_VOCAB
    temperature = tl.load(draft_temperatures + row)
    return source, draft_columns, tl.load(draft_ids + row), drawn >= 0, largest, temperature, whole


@triton.jit
def draft_probs(drafting, ids, is_wanted):
    """p_d of some tokens, float64; of an argmax draft all is on the draft."""
    source, columns_of, draft, is_drawn, largest, temperature, whole = drafting
    if is_drawn:
        columns = ids
        if columns_of is not None:
            columns = tl.load(columns_of + ids, mask=is_wanted, other=-1)
        values = tl.load(source + columns, mask=is_wanted & (columns >= 0), other=-INFINITY)
        probs = weights_of(values, largest, temperature).to(tl.float64) * MASS_UNIT / whole.to(tl.float64)
    else:
        probs = tl.where(ids == draft, 1.0, 0.0).to(tl.float64)
    return probs


@triton.jit
def decide(
    logits,  # [L, V]
    logit_rows,  # [A]
    draft_logits,  # [D, W]
    draft_columns,  # [V]; none where every token has its column
    draft_rows,  # [A]
    draft_ids,  # [A]
    draws,  # [A]
    samples,  # [A]
    accept_words,  # [A]
    temperatures,  # [A]
    draft_temperatures,  # [A]
    min_p,  # [A]
    segment_max,  # [A, C] float32
    segment_argmax,  # [A, C] int32
    segment_bad,  # [A, C] int32
    segment_mass,  # [S, C] int64
    draft_max,  # [X, C] float32
    draft_bad,  # [X, C] int32
    draft_mass,  # [X, C] int64
    thresholds,  # [S] int32
    last_ties,  # [S] int32
    kept_mass,  # [S] int64
    verdicts,  # [A] int32
    num_truncated,
    VOCAB: tl.constexpr,
    DRAFT_VOCAB: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    NUM_DRAFT_SEGMENTS: tl.constexpr,
    BLOCK_DRAFT_SEGMENTS: tl.constexpr,
):
    """The verdict on a row's draft."""
    row = tl.program_id(0)
    sample = tl.load(samples + row)
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
    draft = drafting[2]
    p_t = tl.zeros([], tl.float64)
    verdict = tl.zeros([], tl.int32)
    if row_sum(segment_bad, row, NUM_SEGMENTS, BLOCK_SEGMENTS) > 0:
        verdict += BROKEN
    elif row_max(segment_max, row, NUM_SEGMENTS, BLOCK_SEGMENTS) <= MASKED:
        verdict += EMPTY
    elif sample < 0:
        if argmax_of(segment_max, segment_argmax, row, VOCAB, NUM_SEGMENTS, BLOCK_SEGMENTS) == draft:
            p_t += 1.0
    else:
        threshold = tl.load(min_p + row).to(tl.int32, bitcast=True)
        last_tie = tl.full([], VOCAB, tl.int32)
        mass = row_sum(segment_mass, sample, NUM_SEGMENTS, BLOCK_SEGMENTS)
        if sample < num_truncated:  # `cut` has been here
            threshold = tl.load(thresholds + sample)
            last_tie = tl.load(last_ties + sample)
            mass = tl.load(kept_mass + sample)
        else:
            tl.store(thresholds + sample, threshold)
            tl.store(last_ties + sample, last_tie)
            tl.store(kept_mass + sample, mass)
        if draft >= 0:
            logit = tl.load(logits + tl.load(logit_rows + row) * VOCAB + draft)
            largest = row_max(segment_max, row, NUM_SEGMENTS, BLOCK_SEGMENTS)
            weight = weights_of(logit, largest, tl.load(temperatures + row))
            if is_kept(draft.to(tl.int32), weight, threshold, last_tie):
                p_t += weight.to(tl.float64) * MASS_UNIT / mass.to(tl.float64)
    if (verdict == END) & (draft >= 0):
        p_d = draft_probs(drafting, draft, True)
        if drafting[3]:
            num_bad = row_sum(draft_bad, tl.load(draws + row), NUM_DRAFT_SEGMENTS, BLOCK_DRAFT_SEGMENTS)
            p_d = tl.where((num_bad == 0) & (drafting[4] > -INFINITY), p_d, 0.0)
        if p_d > 0:
            if uniform_of(accept_words, row) * p_d < p_t:
                verdict += KEPT
            else:
                verdict += REJECTED
    tl.store(verdicts + row, verdict)
