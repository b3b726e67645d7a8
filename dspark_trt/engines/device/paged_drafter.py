"""DraftEngine of blocks whose context stands in pages, on torch tensors of one device, over DeviceSessions of
drafter_ingest.onnx and drafter_draft.onnx.

Shape letters: `R` requests, `G` gamma, `T` packed context tokens, `V` vocabulary, `M` tap layers, `D` hidden; `B` rows
and `S` padded query length of a row group.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.draft_bindings import draft_inputs
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch, PageLimits
from dspark_trt.engines.capacity import check_rows, check_tokens
from dspark_trt.engines.device.blocks import DraftCall, fetched_outputs, whole_block
from dspark_trt.engines.device.buckets import bucket, padded
from dspark_trt.engines.device.buffers import Layout, StagedInputs
from dspark_trt.engines.device.calls import padded_tables
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.graphs import BucketCalls, Capture
from dspark_trt.engines.device.pages import DevicePages
from dspark_trt.engines.device.select import VERIFY_LEN, select_layout
from dspark_trt.engines.device.session import DeviceSession, Tensors
from dspark_trt.engines.row_groups import Int64, positions

_TABLES = bindings.group_block_tables(bindings.CONTEXT)
_QUERY_LENGTHS = bindings.group_query_lengths(bindings.CONTEXT)


class PagedDraftEngine:
    """Drafts and ingests; both write into one cache. Outputs are tensors on the device, valid until the next call.

    A call waits for nothing on the device, as in DeviceTargetEngine. Taps may be of any float type; on the device they
    stay there.
    """

    def __init__(
        self,
        ingest_session: DeviceSession,
        draft_session: DeviceSession,
        dims: DrafterDims,
        pages: PageLimits,
        device: torch.device,
        *,
        capture: Capture | None = None,
    ) -> None:
        """Raises EngineBuildError where the device has no room."""
        self.device = device
        self.dims = dims
        self.cache = DevicePages(dims, pages, device)
        self._ingest_session = ingest_session
        self._ingest_calls = BucketCalls(ingest_session, capture)
        self._draft_calls = BucketCalls(draft_session, capture)
        self._draft_layout = lru_cache(maxsize=None)(self._make_draft_layout)
        self._ingest_layout = lru_cache(maxsize=256)(self._make_ingest_layout)
        limits = dims.limits
        self.select_begin = self._make_draft_layout(limits.max_requests).end
        self._most_committed = bucket(
            min(limits.max_requests * (dims.gamma + 1), limits.max_batch_tokens), limits.max_batch_tokens
        )
        with torch_errors("buffers of the drafter"):
            self.inputs = StagedInputs(self._most_input_bytes(), device)
            dtype = getattr(torch, dims.element_type)
            self._taps = torch.zeros((self._most_committed, dims.tap_width), dtype=dtype, device=device)
            self.fetched = fetched_outputs(dims, device)
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
            tables = self.cache.tables(batch.block_tables, rows)
            if query.max() <= self.gamma + 1 and num_tokens <= self._most_committed:
                self._ingest_bucket(taps, tables, past, query)
            else:
                self._ingest_whole(taps.to(self.device, self._taps.dtype).contiguous(), tables, past, query)

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
            self.inputs.send(*call.parts)
            whole = self.enqueue(call)
        n = batch.uniforms.shape[1]
        assert whole.draft_logits is not None, "a device always has them"
        return DraftOutput(whole.draft_ids[:, :n], whole.draft_logits[:, :n], whole.confidence_logits[:, :n])

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        """Nothing is kept by row: pages follow their tables."""

    def draft_call(self, batch: DraftBatch) -> DraftCall:
        """Pads to a bucket of requests. Raises CapacityError when the batch exceeds the limits.

        Padding requests stand at position 0 of page 0, which is nobody's, and nobody reads their drafts.
        """
        rows, past = batch.rows, batch.past_lengths
        check_rows(self.limits, rows, past + 1)
        size = bucket(len(rows), self.limits.max_requests)
        arrays = {
            bindings.ANCHOR_IDS: padded(batch.anchor_ids, size),
            bindings.PAST_LENGTHS: padded(past, size),
            bindings.TEMPERATURES: padded(batch.temperatures, size),
            bindings.UNIFORMS: padded(whole_block(batch.uniforms, self.gamma), size),
            _TABLES: padded_tables(self.cache.tables(batch.block_tables, rows), size),
        }
        parts = ((self._draft_layout(size), arrays),)
        return DraftCall(rows, past, len(rows), self.gamma, size, parts)

    def enqueue(self, call: DraftCall) -> DraftOutput:
        """Enqueue a call whose inputs are on their way."""
        self._draft_calls(call.shape, lambda: self._draft_tensors(call))
        small, count = self.fetched.tensors, call.num_requests
        confidence_logits = small[bindings.CONFIDENCE_LOGITS][:count]
        return DraftOutput(small[bindings.DRAFT_IDS][:count], self._draft_logits[:count], confidence_logits)

    def _draft_tensors(self, call: DraftCall) -> Tensors:
        ((layout, arrays),) = call.parts
        size = len(arrays[bindings.ANCHOR_IDS])  # R, with padding
        small = {name: tensor[:size] for name, tensor in self.fetched.tensors.items() if name != VERIFY_LEN}
        return (
            layout.tensors(self.inputs.memory)
            | {**small, bindings.DRAFT_LOGITS: self._draft_logits[:size]}
            | self.cache.tensors()
        )

    def _ingest_bucket(self, taps: torch.Tensor, tables: Int64, past: Int64, query: Int64) -> None:
        """What a verification committed: up to gamma + 1 tokens a row."""
        num_tokens = len(taps)
        shape = bucket(num_tokens, self._most_committed), bucket(len(past), self.limits.max_requests)
        layout = self._ingest_layout(*shape)
        arrays = {
            bindings.POSITIONS: padded(positions(past, query), shape[0]),
            _QUERY_LENGTHS: padded(query, shape[1]),
            _TABLES: padded_tables(tables, shape[1]),
        }
        self.inputs.send((layout, arrays))
        self._taps[:num_tokens].copy_(taps, non_blocking=True)
        self._ingest_calls(
            shape,
            lambda: layout.tensors(self.inputs.memory) | {bindings.TAPS: self._taps[: shape[0]]} | self.cache.tensors(),
        )

    def _ingest_whole(self, taps: torch.Tensor, tables: Int64, past: Int64, query: Int64) -> None:
        """Prompts' taps, as they are."""
        layout = self._ingest_layout(len(taps), len(past))
        arrays = {bindings.POSITIONS: positions(past, query), _QUERY_LENGTHS: query, _TABLES: tables}
        self.inputs.send((layout, arrays))
        self._ingest_session.run(layout.tensors(self.inputs.memory) | {bindings.TAPS: taps} | self.cache.tensors())

    def _make_draft_layout(self, num_requests: int) -> Layout:
        inputs = [binding for binding in draft_inputs(self.dims) if not bindings.is_cache(binding.name)]
        return Layout(inputs, {"R": num_requests})

    def _make_ingest_layout(self, num_tokens: int, num_rows: int) -> Layout:
        names = (bindings.POSITIONS, _QUERY_LENGTHS, _TABLES)
        inputs = [binding for binding in bindings.ingest_inputs(self.dims) if binding.name in names]
        return Layout(inputs, {"T": num_tokens, f"B_{bindings.CONTEXT}": num_rows})

    def _most_input_bytes(self) -> int:
        """Either a draft and the selection behind it, or an ingest."""
        limits = self.limits
        rows, tokens = limits.max_requests, limits.max_batch_tokens
        ingest = self._make_ingest_layout(tokens, rows)
        return max(select_layout(self.dims, rows, rows, self.select_begin).end, ingest.end)
