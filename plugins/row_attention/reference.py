"""RowAttention in NumPy: the definition that the ONNX function body and the GPU kernels are held against.

Shape letters: `B` rows, `N` query heads, `K` KV heads, `S` padded query length, `C` row capacity, `H` head dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from numpy.typing import NDArray

Array = NDArray[Any]


def row_attention(
    form: RowAttentionForm, *, query: Array, keys: Array, values: Array, last_seen: NDArray[np.int64]
) -> Array:
    """Attend to the positions 0..last_seen of a row. What stands behind the largest of them is not looked at.

    Args:
        query: [B, N, S, H].
        keys, values: [B, K, C, H].
        last_seen: [B, S], the last position that a query sees, 0 <= last_seen < C.

    Returns [B, N, S, H] in the type of `query`; sums are float64.
    """
    attended = np.empty(query.shape, query.dtype)
    for row, limits in enumerate(last_seen):
        num_live = int(limits.max()) + 1
        k, v = (np.repeat(x[row, :, :num_live].astype(np.float64), form.group_size, axis=0) for x in (keys, values))
        scores = query[row].astype(np.float64) @ k.transpose(0, 2, 1) * form.head_dim**-0.5  # [N, S, live]
        scores = np.where(np.arange(num_live) <= limits[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended[row] = (weights / weights.sum(axis=-1, keepdims=True) @ v).astype(query.dtype)
    return attended
