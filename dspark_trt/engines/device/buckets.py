"""The sizes that calls are padded to, so that few CUDA graphs serve all of them;
and how long prompts are shared out to calls.

Shape letters: `B` KV rows and `S` padded query length of a row group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_POWER = 64  # beyond it, padding to a power of two costs more than one more graph


def bucket(size: int, most: int) -> int:
    """The size that `size` is padded to: a power of two up to 64, a multiple of 64 beyond, never above `most`."""
    assert 1 <= size <= most, f"a call of {size} where at most {most} fit"
    padded = 1 << (size - 1).bit_length() if size <= LARGEST_POWER else -(-size // LARGEST_POWER) * LARGEST_POWER
    return min(padded, most)


def query_bucket(longest: int, gamma: int) -> int:
    """Padded query length of rows that decode: one token, or a whole block behind its anchor."""
    assert longest <= gamma + 1, f"{longest} tokens of a row where a block has {gamma + 1}"
    return 1 if longest == 1 else gamma + 1


def prefill_runs(
    rows: NDArray[np.int64], query_lengths: NDArray[np.int64], max_padded_tokens: int
) -> list[tuple[int, int]]:
    """Consecutive chunks that share a call, as ranges (begin, end) of segments; none without chunks.

    A row group spans all rows between its first and its last, padded to its longest query: chunks in distant rows would
    attend with far more padding than tokens. A run ends where B * S would exceed `max_padded_tokens`, which bounds what
    attention needs; a single chunk always fits, being a call's token budget at most.
    """
    begins = [0]
    for at in range(1, len(rows)):
        part = slice(begins[-1], at + 1)
        num_rows = int(rows[part].max() - rows[part].min()) + 1
        if num_rows * int(query_lengths[part].max()) > max_padded_tokens:
            begins.append(at)
    return list(pairwise([*begins, len(rows)])) if len(rows) else []


def chunk_runs(query_lengths: NDArray[np.int64], max_padded_tokens: int | None = None) -> list[tuple[int, int]]:
    """`prefill_runs` of chunks with pages, whose rows stand side by side in a call.

    All chunks share one call, but where attention pads rows to the longest query: there B * S must not exceed
    `max_padded_tokens`, which bounds what it needs. A single chunk always fits, being a call's token budget at most.
    """
    begins = [0]
    for at in range(1, len(query_lengths)) if max_padded_tokens is not None else ():
        part = query_lengths[begins[-1] : at + 1]
        if max_padded_tokens is not None and len(part) * int(part.max()) > max_padded_tokens:
            begins.append(at)
    return list(pairwise([*begins, len(query_lengths)])) if len(query_lengths) else []


def padded(array: NDArray[Any], size: int) -> NDArray[Any]:
    """Zeros behind, along the first axis."""
    padding = np.zeros((size - len(array), *array.shape[1:]), array.dtype)
    return np.concatenate([array, padding])


def padded_with_last(array: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The last value behind; to no less than there are."""
    return np.pad(array, (0, max(size - len(array), 0)), mode="edge")
