"""RowAttention in NumPy: the definition that the ONNX function body and the GPU kernels are held against.

Shape letters: `T` packed tokens, `B` rows, `N` query heads, `K` KV heads, `H` head dim, `P` pages of the pool, `G`
positions of a page, `W` pages of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from numpy.typing import NDArray

Array = NDArray[Any]
Int64 = NDArray[np.int64]


def row_attention(
    form: RowAttentionForm,
    *,
    query: Array,
    pages: Array,
    first_tokens: Int64,
    past_lengths: Int64,
    query_lengths: Int64,
    block_tables: Int64,
    **extents: Int64,
) -> Array:
    """Attend to what a row holds. What stands behind its last query, and in pages that are not its own, is not read.

    Args:
        query: [T, N * H].
        pages: [P, 2, K, G, H], keys and values of the row's own queries among them.
        first_tokens, past_lengths, query_lengths: [B], packed index of a row's first query, positions before it, and
            how many queries it has; 0: the row is idle.
        block_tables: [B, W], the page of each G positions of a row.
        extents: inputs that are there for their shapes.

    Returns [T, N * H] in the type of `query`, zeros for tokens that no row has; sums are float64.
    """
    attended = np.zeros(query.shape, query.dtype)
    for row, (first, past, count) in enumerate(zip(first_tokens, past_lengths, query_lengths, strict=True)):
        if not count:
            continue
        num_live, tokens = int(past + count), slice(int(first), int(first + count))
        held = pages[block_tables[row, : -(-num_live // form.page_positions)]].astype(np.float64)
        held = held.transpose(1, 2, 0, 3, 4).reshape(2, form.num_kv_heads, -1, form.head_dim)[:, :, :num_live]
        k, v = np.repeat(held, form.group_size, axis=1)  # [N, live, H]
        q = query[tokens].reshape(count, form.num_heads, form.head_dim).astype(np.float64).transpose(1, 0, 2)
        limits = past + np.arange(count) if form.is_causal else np.full(count, num_live - 1)
        scores = np.where(np.arange(num_live) <= limits[:, None], q @ k.transpose(0, 2, 1), -np.inf)
        scores = scores * form.head_dim**-0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result = weights / weights.sum(axis=-1, keepdims=True) @ v  # [N, count, H]
        attended[tokens] = result.transpose(1, 0, 2).reshape(count, -1).astype(query.dtype)
    return attended
