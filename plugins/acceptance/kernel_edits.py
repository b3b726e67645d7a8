# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""Penalties, biases and masks: edits of few logits, made in place and taken back at the end of the call.

A row's edits depend on its slot: drafts before it count as generated. Shape letters: as in `launches.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspark_trt_plugins.acceptance.form import MASKED_LOGIT
from dspark_trt_plugins.acceptance.kernel import INFINITY

MASKED = tl.constexpr(MASKED_LOGIT)


@triton.jit
def edit(
    logits,  # [L, V]
    logit_rows,  # [A]
    slots,  # [A]
    first_rows,  # [A]
    draft_ids,  # [A]
    edited_rows,  # [U]
    edit_begins,  # [A]
    edit_ends,  # [A]
    edit_ids,  # [E]
    edit_masks,  # [E]
    edit_is_seen,  # [E]
    edit_counts,  # [E]
    edit_bias,  # [E]
    repetition_penalties,  # [A]
    presence_penalties,  # [A]
    frequency_penalties,  # [A]
    saved_logits,  # [E, slots] float32
    VOCAB: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_EDITS: tl.constexpr,
):
    """A logit that is not finite stays so, masked or not: the row fails."""
    row = tl.load(edited_rows + tl.program_id(0))
    source = logits + tl.load(logit_rows + row) * VOCAB
    slot = tl.load(slots + row)
    first = tl.load(first_rows + row)
    repetition = tl.load(repetition_penalties + row)
    presence = tl.load(presence_penalties + row)
    frequency = tl.load(frequency_penalties + row)
    end = tl.load(edit_ends + row)
    for begin in range(tl.load(edit_begins + row), end, BLOCK_EDITS):
        at = begin + tl.arange(0, BLOCK_EDITS)
        is_edit = at < end
        ids = tl.load(edit_ids + at, mask=is_edit, other=-1)
        counts = tl.load(edit_counts + at, mask=is_edit, other=0.0)
        for before in range(0, slot):
            counts += (tl.load(draft_ids + first + before) == ids).to(tl.float32)
        raw = tl.load(source + ids, mask=is_edit, other=0.0)
        tl.store(saved_logits + at * NUM_SLOTS + slot, raw, mask=is_edit)
        is_seen = (tl.load(edit_is_seen + at, mask=is_edit, other=0) != 0) | (counts > 0)
        values = tl.where(is_seen, tl.where(raw > 0, raw / repetition, raw * repetition), raw)
        values -= presence * (counts > 0).to(tl.float32) + frequency * counts
        values += tl.load(edit_bias + at, mask=is_edit, other=0.0)
        is_masked = (tl.load(edit_masks + at, mask=is_edit, other=0) >> slot) & 1
        values = tl.where(is_masked == 1, MASKED, values)
        tl.store(source + ids, tl.where(tl.abs(raw) < INFINITY, values, raw), mask=is_edit)


@triton.jit
def restore(
    logits,  # [L, V]
    logit_rows,  # [A]
    slots,  # [A]
    edited_rows,  # [U]
    edit_begins,  # [A]
    edit_ends,  # [A]
    edit_ids,  # [E]
    saved_logits,  # [E, slots] float32
    VOCAB: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_EDITS: tl.constexpr,
):
    row = tl.load(edited_rows + tl.program_id(0))
    source = logits + tl.load(logit_rows + row) * VOCAB
    slot = tl.load(slots + row)
    end = tl.load(edit_ends + row)
    for begin in range(tl.load(edit_begins + row), end, BLOCK_EDITS):
        at = begin + tl.arange(0, BLOCK_EDITS)
        ids = tl.load(edit_ids + at, mask=at < end, other=0)
        raw = tl.load(saved_logits + at * NUM_SLOTS + slot, mask=at < end, other=0.0)
        tl.store(source + ids, raw, mask=at < end)
