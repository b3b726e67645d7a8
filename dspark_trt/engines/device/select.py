"""PrefixSelect between a draft and its verification: a call of prefix_select.onnx on the buffers of both engines.

Shape letters: `R` requests that decode, `G` gamma, `T` packed tokens; `B` KV rows of the target's decode group.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.protocol import SelectBatch
from dspark_trt.contract.select_bindings import select_inputs, select_outputs
from dspark_trt.engines.device.buffers import Arrays, Layout
from dspark_trt.engines.device.graphs import BucketCalls, Capture
from dspark_trt.engines.device.session import DeviceSession, Tensors
from dspark_trt.engines.row_groups import Int64

VERIFY_LEN = "verify_len"
PADDING_CAP = -1  # of a request that is none
_TOKEN_INDEX = "token_index"
_ON_DEVICE = (bindings.CONFIDENCE_LOGITS, bindings.DRAFT_IDS, _TOKEN_INDEX)
_UNREAD = ("num_tokens", "first_tokens", "token_requests")  # outputs that verification does not take


def select_layout(dims: DrafterDims, num_requests: int, num_rows: int, begin: int) -> Layout:
    """Where the inputs of the selection that the host sends stand."""
    inputs = [binding for binding in select_inputs(dims) if binding.name not in _ON_DEVICE]
    return Layout(inputs, {"R": num_requests, "B": num_rows}, begin=begin)


def select_arrays(
    select: SelectBatch, anchor_ids: Int64, rows: Int64, past_lengths: Int64, num_requests: int, num_rows: int
) -> Arrays:
    """Inputs of the selection that the host sends, padded to `num_requests`: a padding request has no token."""
    row_requests, row_query_lengths = np.zeros((2, num_rows), np.int64)
    row_requests[rows] = np.arange(len(rows))
    row_query_lengths[rows] = 1

    def padded(values: Int64, padding: int = 0) -> Int64:
        return np.concatenate([values, np.full(num_requests - len(values), padding)])

    return {
        "temperatures": select.temperatures,
        "caps": padded(select.caps, PADDING_CAP),
        "is_forced": padded(select.is_forced.astype(np.int64)),
        "num_admitted": np.array([select.num_admitted], np.int64),
        bindings.ANCHOR_IDS: padded(anchor_ids),
        bindings.PAST_LENGTHS: padded(past_lengths),
        bindings.BLOCK_ROWS: padded(rows),
        bindings.ROW_REQUESTS: row_requests,
        bindings.ROW_QUERY_LENGTHS: row_query_lengths,
    }


class SelectCalls:
    """Calls of one select session."""

    def __init__(
        self, session: DeviceSession, dims: DrafterDims, begin: int, device: torch.device, capture: Capture | None
    ) -> None:
        """`begin`: where its inputs stand in the drafter's staged inputs."""
        self._session = session
        self._calls = BucketCalls(session, capture)
        self._dims = dims
        self.layout = lru_cache(maxsize=256)(lambda requests, rows: select_layout(dims, requests, rows, begin))
        self._every_token = torch.arange(dims.limits.max_batch_tokens, device=device)
        most = max(dims.limits.max_batch_tokens, dims.limits.max_requests)
        self._unread = {name: torch.zeros(most, dtype=torch.int64, device=device) for name in _UNREAD}

    def enqueue(
        self,
        num_requests: int,
        num_rows: int,
        staged: torch.Tensor,
        fetched: Tensors,
        target: Tensors,
        *,
        is_bucket: bool,
    ) -> None:
        """From the drafter's outputs to the target's index tensors, `target` [T] and [B, ...],
        and `fetched` verify_len.

        A bucket stays at its addresses; other calls write the first tokens of a longer step.
        """

        def tensors() -> Tensors:
            extents = {"R": num_requests, "B": num_rows, "T": len(target[bindings.TOKEN_IDS])}
            inputs = {
                bindings.CONFIDENCE_LOGITS: fetched[bindings.CONFIDENCE_LOGITS][:num_requests],
                bindings.DRAFT_IDS: fetched[bindings.DRAFT_IDS][:num_requests],
                _TOKEN_INDEX: self._every_token[: extents["T"]],
            }
            outputs = {VERIFY_LEN: fetched[VERIFY_LEN][:num_requests]}
            for binding in select_outputs(self._dims):
                (size, *_) = binding.shape
                if binding.name in _UNREAD:
                    outputs[binding.name] = self._unread[binding.name][
                        : extents[size] if isinstance(size, str) else size
                    ]
                elif binding.name != VERIFY_LEN:
                    outputs[binding.name] = target[binding.name]
            return self.layout(num_requests, num_rows).tensors(staged) | inputs | outputs

        if is_bucket:
            self._calls((num_requests, num_rows, len(target[bindings.TOKEN_IDS])), tensors)
        else:
            self._session.run(tensors())
