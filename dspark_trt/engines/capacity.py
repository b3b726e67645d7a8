"""Checks of one call against the limits of an engine, before anything is computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import CapacityError


def check_tokens(limits: EngineLimits, num_tokens: int) -> None:
    """Raises CapacityError when a call has too many packed tokens."""
    if num_tokens > limits.max_batch_tokens:
        raise CapacityError(
            f"a call of {num_tokens} packed tokens exceeds max_batch_tokens {limits.max_batch_tokens}; split it, or "
            "build with a larger --max-batch-tokens"
        )


def check_rows(limits: EngineLimits, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Raises CapacityError when a call would write outside the pool or outside a row."""
    if lengths.max() > limits.max_seq_len:
        raise CapacityError(
            f"a row would hold {int(lengths.max())} positions, max_seq_len is {limits.max_seq_len}; end the request, "
            "or build with a larger --max-seq-len"
        )
    if rows.min() < 0 or rows.max() >= limits.max_requests:
        raise CapacityError(
            f"rows {int(rows.min())}..{int(rows.max())} are not all below max_requests {limits.max_requests}; "
            "build with a larger --max-requests"
        )
