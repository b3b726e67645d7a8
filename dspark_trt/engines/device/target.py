"""TargetEngine on torch tensors of one device, over a DeviceSession of target.onnx.

Shape letters: `R` requests, `G` gamma, `T` packed tokens, `L` logit rows, `V` vocabulary, `M` tap layers, `D` hidden;
`B` rows and `S` padded query length of a row group.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import TargetDims
from dspark_trt.contract.protocol import EngineLimits, PageLimits, TargetBatch, TargetOutput
from dspark_trt.engines.device.buckets import bucket
from dspark_trt.engines.device.buffers import Layout, StagedInputs
from dspark_trt.engines.device.calls import CallShape, TargetCall, check_batch, target_calls
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.graphs import BucketCalls, Capture
from dspark_trt.engines.device.pages import DevicePages
from dspark_trt.engines.device.session import DeviceSession, Tensors

_NUM_KEPT_LAYOUTS = 256


class DeviceTargetEngine:
    """Verifies. Outputs are tensors on the device, views of buffers that the next call overwrites.

    A call waits for nothing on the device: it makes index arrays, enqueues their copy and the graph, and returns.
    """

    def __init__(
        self,
        session: DeviceSession,
        dims: TargetDims,
        pages: PageLimits,
        device: torch.device,
        *,
        gamma: int,
        capture: Capture | None = None,
    ) -> None:
        """`gamma` of the drafter, 0 without one: a row verifies up to gamma + 1 tokens in a call.

        Raises EngineBuildError where the device has no room.
        """
        self.device = device
        self.gamma = gamma
        self.cache = DevicePages(dims, pages, device)
        self._dims = dims
        self._session = session
        self._calls = BucketCalls(session, capture)
        self._layout = lru_cache(maxsize=_NUM_KEPT_LAYOUTS)(self._make_layout)
        limits = dims.limits
        num_tokens = limits.max_batch_tokens
        of_blocks = bucket(min(num_tokens, limits.max_requests * (gamma + 1)), num_tokens)
        with torch_errors("buffers of the target"):
            self._inputs = StagedInputs(self._largest_layout().end, device)
            self._every_token = torch.arange(num_tokens, device=device)
            self._nothing = torch.zeros((1, max(1, dims.cache.table_width)), dtype=torch.int64, device=device)
            # of verified blocks and the ends of prompts; one more for a call that wants none
            num_logits = min(num_tokens, of_blocks + limits.max_requests) + 1
            self._logits = torch.zeros((num_logits, dims.vocab_size), device=device)
            dtype = getattr(torch, dims.element_type)
            self._taps = torch.zeros((num_tokens, dims.tap_width), dtype=dtype, device=device)

    @property
    def limits(self) -> EngineLimits:
        return self._dims.limits

    @property
    def vocab_size(self) -> int:
        return self._dims.vocab_size

    def forward(self, batch: TargetBatch) -> TargetOutput:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when the backend fails."""
        check_batch(batch, batch.query_lengths, self.gamma, self.limits)
        calls = self.calls(batch)
        with torch_errors("target"):
            self.send(calls[0])
            return self.enqueue(calls)

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        """Nothing is kept by row: pages follow their tables."""

    def calls(self, batch: TargetBatch, num_selected: int | None = None) -> list[TargetCall]:
        """Of a checked batch, as `target_calls`."""
        tables = self.cache.tables(batch.block_tables, batch.rows)
        pads_chunks = self._dims.pads_chunks
        return target_calls(batch, tables, self.gamma, self.limits, num_selected, pads_chunks=pads_chunks)

    def every_token(self, num_tokens: int) -> torch.Tensor:
        """0 .. num_tokens - 1, int64."""
        return self._every_token[:num_tokens]

    def index_tensors(self, shape: CallShape) -> Tensors:
        """The index inputs that a call of this shape reads: always at the same addresses."""
        return self._layout(shape).tensors(self._inputs.memory)

    def send(self, call: TargetCall) -> None:
        """Enqueue the copy of a call's index arrays."""
        if call.arrays:
            self._inputs.send((self._layout(call.shape), call.arrays))

    def enqueue(self, calls: list[TargetCall]) -> TargetOutput:
        """Enqueue the calls of a step; the index arrays of the first one are on their way already."""
        num_logits, num_tokens = sum(call.num_logits for call in calls), sum(call.num_tokens for call in calls)
        logits, taps = self._logits, self._taps
        if num_logits >= len(logits):  # more than verification asks for
            logits = torch.empty((num_logits + 1, self.vocab_size), device=self.device)
        if calls[0].shape.prefill is None:
            (call,) = calls
            self._calls(call.shape, lambda: self._bucket_tensors(call.shape))
        else:
            first_logit = first_token = 0
            for at, call in enumerate(calls):
                if at:
                    self.send(call)
                self._run(call, logits[first_logit:], taps[first_token:])
                first_logit, first_token = first_logit + call.num_logits, first_token + call.num_tokens
        return TargetOutput(logits[:num_logits], taps[:num_tokens])

    def _run(self, call: TargetCall, logits: torch.Tensor, taps: torch.Tensor) -> None:
        """One call as it is, into the beginning of `logits` and `taps`."""
        assert call.shape.prefill is not None, "buckets are bound"
        self._session.run(
            self.index_tensors(call.shape) | self._outputs(call.shape, logits, taps) | self.cache.tensors()
        )

    def _bucket_tensors(self, shape: CallShape) -> Tensors:
        """Everything stays at its address. The prefill group is one row without tokens."""
        index = self.index_tensors(shape)
        constants = {
            bindings.LOGIT_ROWS: self.every_token(shape.num_tokens),
            bindings.group_tokens(bindings.PREFILL): self._nothing[:, :1],
            bindings.group_past_lengths(bindings.PREFILL): self._nothing[0, :1],
            bindings.group_query_lengths(bindings.PREFILL): self._nothing[0, :1],
            bindings.group_block_tables(bindings.PREFILL): self._nothing,
        }
        return index | constants | self._outputs(shape, self._logits, self._taps) | self.cache.tensors()

    def _outputs(self, shape: CallShape, logits: torch.Tensor, taps: torch.Tensor) -> Tensors:
        outputs = {bindings.LOGITS: logits[: shape.num_logits]}
        if self._dims.num_taps:
            outputs[bindings.TAPS] = taps[: shape.num_tokens]
        return outputs

    def _make_layout(self, shape: CallShape) -> Layout:
        extents = {"T": shape.num_tokens, "L": shape.num_logits}
        names = [bindings.TOKEN_IDS, bindings.POSITIONS]
        groups = [bindings.DECODE]
        if shape.prefill is not None:
            names.append(bindings.LOGIT_ROWS)
            groups.append(bindings.PREFILL)
        for group, group_shape in zip(groups, (shape.decode, shape.prefill), strict=False):
            assert group_shape is not None, "a group that is listed has a shape"
            extents |= {f"B_{group}": group_shape[0], f"S_{group}": group_shape[1]}
            names += [binding.name for binding in bindings.row_group(group, self._dims)]
        return Layout([b for b in bindings.target_inputs(self._dims) if b.name in names], extents)

    def _largest_layout(self) -> Layout:
        """No call takes more: of B chunks none has more than max_batch_tokens - B + 1 tokens."""
        rows, tokens = self.limits.max_requests, self.limits.max_batch_tokens
        shape = CallShape(tokens, tokens, (rows, self.gamma + 1), (rows, tokens))
        return self._make_layout(shape)
