"""DraftEngine on torch tensors of one device, over DeviceSessions of drafter_ingest.onnx and drafter_draft.onnx.

Shape letters: `R` requests, `G` gamma, `T` packed context tokens, `V` vocabulary, `M` tap layers, `D` hidden; `B` KV
rows and `S` padded query length of a row group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dspark_trt.contract import bindings
from dspark_trt.contract.bindings import Binding
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch
from dspark_trt.engines.capacity import check_rows, check_tokens
from dspark_trt.engines.device.buckets import bucket, prefill_runs
from dspark_trt.engines.device.buffers import Arrays, FetchedOutputs, Layout, StagedInputs
from dspark_trt.engines.device.cache import DeviceCache
from dspark_trt.engines.device.calls import group_arrays
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.graphs import BucketCalls, Capture
from dspark_trt.engines.device.select import VERIFY_LEN, select_layout
from dspark_trt.engines.device.session import DeviceSession, Tensors
from dspark_trt.engines.row_groups import Int64, positions, row_group


@dataclass(frozen=True, slots=True)
class DraftCall:
    """One call of the draft graph, padded: its host inputs and where they go."""

    rows: Int64  # without padding
    past_lengths: Int64
    shape: tuple[int, int]  # R, B
    layout: Layout
    arrays: Arrays


class DeviceDraftEngine:
    """Drafts and ingests; both write into one cache. Outputs are tensors on the device, valid until the next call.

    A call waits for nothing on the device, as in DeviceTargetEngine. Taps may be of any float type; on the device they
    stay there.
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
        self._ingest_session = ingest_session
        self._ingest_calls = BucketCalls(ingest_session, capture)
        self._draft_calls = BucketCalls(draft_session, capture)
        self._draft_layout = lru_cache(maxsize=None)(self._make_draft_layout)
        self._ingest_layout = lru_cache(maxsize=256)(self._make_ingest_layout)
        limits, blocks = dims.limits, {"R": dims.limits.max_requests}
        self.select_begin = self._make_draft_layout(limits.max_requests, limits.max_requests).end
        self._most_committed = bucket(
            min(limits.max_requests * (dims.gamma + 1), limits.max_batch_tokens), limits.max_batch_tokens
        )
        with torch_errors("buffers of the drafter"):
            self.inputs = StagedInputs(self._most_input_bytes(), device)
            dtype = getattr(torch, dims.element_type)
            self._taps = torch.zeros((self._most_committed, dims.tap_width), dtype=dtype, device=device)
            outputs = {binding.name: binding for binding in bindings.draft_outputs(dims)}
            small = [outputs[name] for name in (bindings.DRAFT_IDS, bindings.CONFIDENCE_LOGITS)]
            verify_len = Binding(VERIFY_LEN, "int64", ("R",))
            self.fetched = FetchedOutputs(Layout([*small, verify_len], blocks), device)
            self._draft_logits = torch.zeros((limits.max_requests, dims.gamma, dims.vocab_size), device=device)

    @property
    def limits(self) -> EngineLimits:
        return self.dims.limits

    @property
    def gamma(self) -> int:
        return self.dims.gamma

    def ingest(self, batch: IngestBatch) -> None:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when the backend fails."""
        rows, past, query = batch.rows, batch.past_lengths, batch.query_lengths
        check_rows(self.limits, rows, past + query)
        num_tokens = int(query.sum())
        check_tokens(self.limits, num_tokens)
        with torch_errors("drafter, ingest"):
            taps = torch.as_tensor(batch.taps)
            self.cache.prepare(rows, past, max(int(query.max()), self.gamma + 1))
            if query.max() <= self.gamma + 1 and num_tokens <= self._most_committed:
                self._ingest_bucket(taps, rows, past, query)
                return
            taps = taps.to(self.device, self._taps.dtype).contiguous()
            begin = 0
            for first, last in prefill_runs(rows, query, self.limits.max_batch_tokens):
                part = slice(first, last)
                end = begin + int(query[part].sum())
                self._ingest_whole(taps[begin:end], rows[part], past[part], query[part])
                begin = end

    @property
    def draft_vocab(self) -> Int64 | None:
        return None

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        """Computes all gamma slots, whatever is asked for: the sequential stage is one kernel.

        Raises CapacityError when the batch exceeds the limits, EngineBuildError when the backend fails.
        """
        if ingest is not None:
            self.ingest(ingest)
        call = self.draft_call(batch)
        with torch_errors("drafter, draft"):
            self.inputs.send((call.layout, call.arrays))
            whole = self.enqueue(call)
        n = batch.uniforms.shape[1]
        assert whole.draft_logits is not None, "a device always has them"
        return DraftOutput(whole.draft_ids[:, :n], whole.draft_logits[:, :n], whole.confidence_logits[:, :n])

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        """Raises EngineBuildError when the backend fails."""
        with torch_errors("drafter"):
            self.cache.move_row(source, destination, num_positions)

    def draft_call(self, batch: DraftBatch) -> DraftCall:
        """Pads to a bucket of requests and of rows from row 0 on.
        Raises CapacityError when the batch exceeds the limits.

        Padding requests read the answer of row 0 and write nothing: only a row that has a request is written.
        """
        rows, past = batch.rows, batch.past_lengths
        check_rows(self.limits, rows, past + 1)
        count, most = len(rows), self.limits.max_requests
        shape = bucket(count, most), bucket(int(rows.max()) + 1, most)
        row_requests, row_query_lengths = np.zeros((2, shape[1]), np.int64)
        row_requests[rows] = np.arange(count)
        row_query_lengths[rows] = 1
        arrays = {
            bindings.ANCHOR_IDS: _padded(batch.anchor_ids, shape[0]),
            bindings.PAST_LENGTHS: _padded(past, shape[0]),
            bindings.TEMPERATURES: _padded(batch.temperatures, shape[0]),
            bindings.UNIFORMS: _padded(_whole_block(batch.uniforms, self.gamma), shape[0]),
            bindings.BLOCK_ROWS: _padded(rows, shape[0]),
            bindings.ROW_REQUESTS: row_requests,
            bindings.ROW_QUERY_LENGTHS: row_query_lengths,
        }
        return DraftCall(rows, past, shape, self._draft_layout(*shape), arrays)

    def enqueue(self, call: DraftCall) -> DraftOutput:
        """Enqueue a call whose inputs are on their way."""
        self.cache.prepare(call.rows, call.past_lengths, self.dims.block_length)
        self._draft_calls(call.shape, lambda: self._draft_tensors(call))
        small, count = self.fetched.tensors, len(call.rows)
        confidence_logits = small[bindings.CONFIDENCE_LOGITS][:count]
        return DraftOutput(small[bindings.DRAFT_IDS][:count], self._draft_logits[:count], confidence_logits)

    def _draft_tensors(self, call: DraftCall) -> Tensors:
        num_requests, num_rows = call.shape
        small = {name: tensor[:num_requests] for name, tensor in self.fetched.tensors.items() if name != VERIFY_LEN}
        return (
            call.layout.tensors(self.inputs.memory)
            | {**small, bindings.DRAFT_LOGITS: self._draft_logits[:num_requests]}
            | self.cache.tensors(bindings.CONTEXT, 0, num_rows)
        )

    def _ingest_bucket(self, taps: torch.Tensor, rows: Int64, past: Int64, query: Int64) -> None:
        """What a verification committed: up to gamma + 1 tokens a row."""
        num_tokens = len(taps)
        shape = bucket(num_tokens, self._most_committed), bucket(int(rows.max()) + 1, self.limits.max_requests)
        group = row_group(rows, past, query, padded_to=(shape[1], self.gamma + 1))
        layout = self._ingest_layout(shape[0], *group.tokens.shape)
        arrays = group_arrays(bindings.CONTEXT, group)
        self.inputs.send((layout, {bindings.POSITIONS: _padded(positions(past, query), shape[0]), **arrays}))
        self._taps[:num_tokens].copy_(taps, non_blocking=True)
        self._ingest_calls(
            shape,
            lambda: (
                layout.tensors(self.inputs.memory)
                | {bindings.TAPS: self._taps[: shape[0]]}
                | self.cache.tensors(bindings.CONTEXT, 0, shape[1])
            ),
        )

    def _ingest_whole(self, taps: torch.Tensor, rows: Int64, past: Int64, query: Int64) -> None:
        """A prompt's taps, as they are."""
        group = row_group(rows, past, query)
        layout = self._ingest_layout(len(taps), *group.tokens.shape)
        arrays = group_arrays(bindings.CONTEXT, group)
        self.inputs.send((layout, {bindings.POSITIONS: positions(past, query), **arrays}))
        self._ingest_session.run(
            layout.tensors(self.inputs.memory)
            | {bindings.TAPS: taps}
            | self.cache.tensors(bindings.CONTEXT, group.first_row, group.num_rows)
        )

    def _make_draft_layout(self, num_requests: int, num_rows: int) -> Layout:
        inputs = [binding for binding in bindings.draft_inputs(self.dims) if not _is_cache(binding)]
        return Layout(inputs, {"R": num_requests, f"B_{bindings.CONTEXT}": num_rows})

    def _make_ingest_layout(self, num_tokens: int, num_rows: int, num_queries: int) -> Layout:
        inputs = [Binding(bindings.POSITIONS, "int64", ("T",)), *bindings.row_group(bindings.CONTEXT)]
        extents = {"T": num_tokens, f"B_{bindings.CONTEXT}": num_rows, f"S_{bindings.CONTEXT}": num_queries}
        return Layout(inputs, extents)

    def _most_input_bytes(self) -> int:
        """Either a draft and the selection behind it, or an ingest."""
        limits = self.limits
        rows, tokens = limits.max_requests, limits.max_batch_tokens
        ingest = self._make_ingest_layout(tokens, rows, max(self.gamma + 1, -(-tokens // rows)))
        return max(select_layout(self.dims, rows, rows, self.select_begin).end, ingest.end)


def _is_cache(binding: Binding) -> bool:
    return "_cache." in binding.name


def _whole_block(uniforms: NDArray[np.float32], gamma: int) -> NDArray[np.float32]:
    """Zeros for the slots that nobody asked for."""
    return np.pad(uniforms, ((0, 0), (0, gamma - uniforms.shape[1])))


def _padded(array: NDArray[Any], size: int) -> NDArray[Any]:
    """Zeros behind, along the first axis."""
    padding = np.zeros((size - len(array), *array.shape[1:]), array.dtype)
    return np.concatenate([array, padding])
