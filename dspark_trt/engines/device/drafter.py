"""DraftEngine with KV rows of its own, on torch tensors of one device, over DeviceSessions of drafter_ingest.onnx and
drafter_draft.onnx.

Shape letters: `R` requests, `G` gamma, `V` vocabulary; `B` KV rows of a range.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.draft_bindings import block_inputs
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch
from dspark_trt.engines.capacity import check_rows
from dspark_trt.engines.device.blocks import DraftCall, fetched_outputs, whole_block
from dspark_trt.engines.device.buckets import bucket, padded
from dspark_trt.engines.device.buffers import Layout, StagedInputs
from dspark_trt.engines.device.cache import DeviceCache
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.graphs import BucketCalls, Capture
from dspark_trt.engines.device.ingest import IngestCalls
from dspark_trt.engines.device.row_states import KeepingStates, SlotsInTurn, StartingFromStates, row_states
from dspark_trt.engines.device.select import select_layout
from dspark_trt.engines.device.session import DeviceSession, Tensors
from dspark_trt.engines.row_groups import Int64

_SMALL = (bindings.DRAFT_IDS, bindings.CONFIDENCE_LOGITS)


class DeviceDraftEngine:
    """Drafts and ingests; both write into one cache. Outputs are tensors on the device, valid until the next call.

    Knows no family: what the graphs take and give is in their dims. A call waits for nothing on the device, as in
    DeviceTargetEngine.
    """

    def __init__(
        self,
        ingest_session: DeviceSession,
        draft_session: DeviceSession,
        dims: DrafterDims,
        device: torch.device,
        *,
        capture: Capture | None = None,
    ) -> None:
        """Raises EngineBuildError where the device has no room."""
        self.device = device
        self.dims = dims
        self.cache = DeviceCache(dims, device)
        most = dims.limits.max_requests
        self._draft_layout = lru_cache(maxsize=None)(self._make_draft_layout)
        self.select_begin = self._make_draft_layout(most, most).end
        with torch_errors("buffers of the drafter"):
            self._states = row_states(dims, device)
            if dims.row_state_width:
                ingest_session = KeepingStates(ingest_session, self._states)
                start = SlotsInTurn if dims.is_slot_by_slot else StartingFromStates
                draft_session = start(draft_session, dims, self._states)
            self.ingests = IngestCalls(ingest_session, dims, self.cache, device, capture=capture)
            self._draft_calls = BucketCalls(draft_session, capture)
            of_selection = select_layout(dims, most, most, self.select_begin).end
            self.inputs = StagedInputs(max(of_selection, self.ingests.most_input_bytes()), device)
            self.fetched = fetched_outputs(dims, device)
            self._draft_logits = torch.zeros((most, dims.gamma, dims.vocab_size), device=device)

    @property
    def limits(self) -> EngineLimits:
        return self.dims.limits

    @property
    def gamma(self) -> int:
        return self.dims.gamma

    @property
    def draft_vocab(self) -> Int64 | None:
        return None

    def ingest(self, batch: IngestBatch) -> None:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when the backend fails."""
        self.ingests.ingest(batch, self.inputs)

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        """Where one call makes all slots, it computes gamma of them, whatever is asked for.

        Raises CapacityError when the batch exceeds the limits, EngineBuildError when the backend fails.
        """
        if ingest is not None:
            self.ingest(ingest)
        call = self.draft_call(batch)
        with torch_errors("drafter, draft"):
            self.inputs.send(*call.parts)
            whole = self.enqueue(call)
        n = batch.uniforms.shape[1]
        assert whole.draft_logits is not None, "a device always has them"
        return DraftOutput(whole.draft_ids[:, :n], whole.draft_logits[:, :n], whole.confidence_logits[:, :n])

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        """Raises EngineBuildError when the backend fails."""
        with torch_errors("drafter"):
            self.cache.move_row(source, destination, num_positions)
            self._states[destination].copy_(self._states[source])

    def draft_call(self, batch: DraftBatch) -> DraftCall:
        """Pads to a bucket of requests and of rows from row 0 on.
        Raises CapacityError when the batch exceeds the limits.

        Padding requests read the answer of row 0 and write nothing: only a row that has a request is written.
        """
        rows, past = batch.rows, batch.past_lengths
        check_rows(self.limits, rows, past + 1)
        count, most = len(rows), self.limits.max_requests
        num_requests, num_rows = bucket(count, most), bucket(int(rows.max()) + 1, most)
        row_requests, row_query_lengths = np.zeros((2, num_rows), np.int64)
        row_requests[rows] = np.arange(count)
        row_query_lengths[rows] = 1
        arrays = {
            bindings.ANCHOR_IDS: padded(batch.anchor_ids, num_requests),
            bindings.PAST_LENGTHS: padded(past, num_requests),
            bindings.TEMPERATURES: padded(batch.temperatures, num_requests),
            bindings.UNIFORMS: padded(whole_block(batch.uniforms, self.gamma), num_requests),
            bindings.BLOCK_ROWS: padded(rows, num_requests),
            bindings.ROW_REQUESTS: row_requests,
            bindings.ROW_QUERY_LENGTHS: row_query_lengths,
        }
        num_slots = batch.uniforms.shape[1] if self.dims.is_slot_by_slot else self.gamma
        layout = self._draft_layout(num_requests, num_rows)
        return DraftCall(rows, past, count, num_slots, (num_requests, num_rows, num_slots), ((layout, arrays),))

    def enqueue(self, call: DraftCall) -> DraftOutput:
        """Enqueue a call whose inputs are on their way."""
        self.cache.prepare(call.rows, call.past_lengths, self.dims.block_length)
        self._draft_calls(call.shape, lambda: self._draft_tensors(call))
        small, count = self.fetched.tensors, call.num_requests
        confidence_logits = small[bindings.CONFIDENCE_LOGITS][:count]
        return DraftOutput(small[bindings.DRAFT_IDS][:count], self._draft_logits[:count], confidence_logits)

    def _draft_tensors(self, call: DraftCall) -> Tensors:
        ((layout, _),) = call.parts
        staged = layout.tensors(self.inputs.memory)
        (num_requests,), num_rows = staged[bindings.ANCHOR_IDS].shape, len(staged[bindings.ROW_REQUESTS])
        if self.dims.is_slot_by_slot:
            staged[bindings.UNIFORMS] = staged[bindings.UNIFORMS][:, : call.num_slots]
        small = {name: self.fetched.tensors[name][:num_requests] for name in _SMALL}
        return (
            staged
            | {**small, bindings.DRAFT_LOGITS: self._draft_logits[:num_requests]}
            | self.cache.tensors(bindings.CONTEXT, 0, num_rows)
        )

    def _make_draft_layout(self, num_requests: int, num_rows: int) -> Layout:
        return Layout(block_inputs(self.dims), {"R": num_requests, f"B_{bindings.CONTEXT}": num_rows})
