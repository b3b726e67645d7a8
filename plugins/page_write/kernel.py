# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""PageWrite in OpenAI Triton: one program copies the keys and values of one token into its slot.

Shape letters: `T` packed tokens, `K` KV heads, `H` head dim, `P` pages of the pool, `G` positions of a page.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_token(
    keys,  # [T, K * H]
    values,  # [T, K * H]
    slots,  # [T]
    written,  # [P, 2, K, G, H]
    NUM_KV_HEADS: tl.constexpr,
    PAGE_POSITIONS: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both copies are whole vectors: a head's numbers stand side by side on both sides."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    of_values: tl.constexpr = NUM_KV_HEADS * PAGE_POSITIONS * H
    first = slot // PAGE_POSITIONS * (2 * of_values) + slot % PAGE_POSITIONS * H
    width: tl.constexpr = NUM_KV_HEADS * H
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        is_column = columns < width
        at = first + columns // H * (PAGE_POSITIONS * H) + columns % H
        key = tl.load(keys + token * width + columns, mask=is_column)
        tl.store(written + at, key, mask=is_column)
        value = tl.load(values + token * width + columns, mask=is_column)
        tl.store(written + at + of_values, value, mask=is_column)
