"""DraftEngine of a language model on torch tensors of one device, over one DeviceSession of drafter_model.onnx.

What a verification committed is read by the first pass of the next block, so that ingesting costs no pass of its own
where both are asked for together. Prompts go as they are.

Shape letters: `R` requests, `n` slots, `T` packed tokens, `W` draft vocabulary; `B` KV rows and `S` padded query length
of a row group.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch
from dspark_trt.engines.capacity import check_rows, check_tokens
from dspark_trt.engines.device.blocks import DraftCall, fetched_outputs
from dspark_trt.engines.device.buckets import bucket, padded, prefill_runs
from dspark_trt.engines.device.buffers import Arrays, Layout, StagedInputs
from dspark_trt.engines.device.cache import DeviceCache
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.graphs import BucketCalls, Capture
from dspark_trt.engines.device.model_arrays import Segments, next_arrays, pass_arrays
from dspark_trt.engines.device.model_block import ModelBlock, next_layout, pass_layout
from dspark_trt.engines.device.select import select_layout
from dspark_trt.engines.device.session import DeviceSession, Tensors
from dspark_trt.engines.row_groups import Int64


class DeviceLanguageModelEngine:
    """Drafts and ingests by passes of one graph. Outputs are tensors on the device, valid until the next call.

    A call waits for nothing on the device, as in DeviceTargetEngine.
    """

    def __init__(
        self, session: DeviceSession, dims: DrafterDims, device: torch.device, *, capture: Capture | None = None
    ) -> None:
        """Raises EngineBuildError where the device has no room."""
        self.device = device
        self.dims = dims
        self.cache = DeviceCache(dims, device)
        self._session = session
        self._pass_layout = lru_cache(maxsize=256)(self._make_pass_layout)
        self._next_layout = lru_cache(maxsize=256)(self._make_next_layout)
        limits = dims.limits
        most = limits.max_requests
        self._most_tokens = most * dims.longest_pass
        self._num_drafted = 1 if dims.mask_token_id is None else dims.gamma  # of a request, by a block's first pass
        largest = self._make_pass_layout(self._most_tokens, most * self._num_drafted, most, dims.longest_pass)
        self.select_begin = largest.end
        if self._num_drafted < dims.gamma:
            self.select_begin = self._make_next_layout(most, most, dims.gamma - 1, largest.end).end
        prompts = self._make_pass_layout(limits.max_batch_tokens, 1, most, -(-limits.max_batch_tokens // most))
        with torch_errors("buffers of the drafter"):
            self._block = ModelBlock(session, dims, device)
            self._block_calls = BucketCalls(self._block, capture)
            self._ingest_calls = BucketCalls(session, capture)
            of_selection = select_layout(dims, most, most, self.select_begin).end
            self.inputs = StagedInputs(max(of_selection, prompts.end), device)
            self.fetched = fetched_outputs(dims, device)
            self._draft_logits = torch.zeros((most * dims.gamma, dims.vocab_size), device=device)

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
        segments = self._ingested(batch)
        with torch_errors("drafter, ingest"):
            self.cache.prepare(segments.rows, segments.past, max(int(segments.query.max()), self.gamma + 1))
            if self._is_short(segments):
                num_rows = bucket(int(segments.rows.max()) + 1, self.limits.max_requests)
                num_tokens, rows = bucket(len(segments.token_ids), self._most_tokens), (num_rows, self.gamma + 1)
                layout = self._send(pass_arrays(segments, num_tokens, rows))
                self._ingest_calls((num_tokens, num_rows), lambda: self._ingest_tensors(layout, 0, num_rows))
                return
            for first, last in prefill_runs(segments.rows, segments.query, self.limits.max_batch_tokens):
                run = segments.part(first, last)
                layout = self._send(pass_arrays(run, len(run.token_ids), None))
                first_row, last_row = int(run.rows.min()), int(run.rows.max())
                self._session.run(self._ingest_tensors(layout, first_row, last_row - first_row + 1))

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when the backend fails."""
        if ingest is not None and not self._is_short(self._ingested(ingest)):
            self.ingest(ingest)
            ingest = None
        call = self.draft_call(batch, ingest)
        with torch_errors("drafter, draft"):
            self.inputs.send(*call.parts)
            whole = self.enqueue(call)
        n = call.num_slots
        return DraftOutput(whole.draft_ids[:, :n], whole.draft_logits, whole.confidence_logits[:, :n])

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        """Raises EngineBuildError when the backend fails."""
        with torch_errors("drafter"):
            self.cache.move_row(source, destination, num_positions)

    def draft_call(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftCall:
        """Pads to a bucket of tokens, of requests and of rows from row 0 on. `ingest` is short.

        Raises CapacityError when a batch exceeds the limits.
        """
        check_rows(self.limits, batch.rows, batch.past_lengths + 1)
        count, num_slots = batch.uniforms.shape
        num_drafted = num_slots if self._num_drafted > 1 else 1
        segments = self._of_first_pass(batch, ingest, num_drafted)
        most = self.limits.max_requests
        num_requests, num_rows = bucket(count, most), bucket(int(segments.rows.max()) + 1, most)
        rows = num_rows, num_drafted if ingest is None else self.gamma + 1 + num_drafted
        shape = bucket(len(segments.token_ids), self._most_tokens), num_requests * num_drafted, *rows
        first = self._pass_layout(*shape)
        ends = segments.query.cumsum()[:count]
        wanted = (ends[:, None] - num_drafted + np.arange(num_drafted)).reshape(-1)
        parts = [
            (
                first,
                pass_arrays(segments, shape[0], rows)
                | {
                    bindings.LOGIT_ROWS: padded(wanted, shape[1]),
                    bindings.TEMPERATURES: padded(np.repeat(batch.temperatures, num_drafted), shape[1]),
                    bindings.UNIFORMS: padded(batch.uniforms[:, :num_drafted].reshape(-1, 1), shape[1]),
                },
            )
        ]
        if num_drafted < num_slots:
            following = self._next_layout(num_requests, num_rows, num_slots - 1, first.end)
            parts.append((following, next_arrays(batch, num_requests, num_rows)))
        key = (*shape, num_requests, num_slots)
        return DraftCall(segments.rows, segments.past, count, num_slots, key, tuple(parts))

    def enqueue(self, call: DraftCall) -> DraftOutput:
        """Enqueue a call whose inputs are on their way."""
        self.cache.prepare(call.rows, call.past_lengths, self.dims.longest_pass + self.gamma)
        self._block_calls(call.shape, lambda: self._block_tensors(call))
        count, n = call.num_requests, call.num_slots
        small = {name: self.fetched.tensors[name][:count] for name in (bindings.DRAFT_IDS, bindings.CONFIDENCE_LOGITS)}
        logits = self._draft_logits[: count * n].view(count, n, -1)
        return DraftOutput(small[bindings.DRAFT_IDS], logits, small[bindings.CONFIDENCE_LOGITS])

    def _ingested(self, batch: IngestBatch) -> Segments:
        """Raises CapacityError when the batch exceeds the limits."""
        assert batch.token_ids is not None, "the runtime gives the ids of what it commits"
        check_rows(self.limits, batch.rows, batch.past_lengths + batch.query_lengths)
        check_tokens(self.limits, len(batch.token_ids))
        return Segments(batch.rows, batch.past_lengths, batch.query_lengths, batch.token_ids)

    def _is_short(self, segments: Segments) -> bool:
        """Whether it is what a verification committed, and no prompt."""
        return bool(segments.query.max() <= self.gamma + 1)

    def _of_first_pass(self, batch: DraftBatch, ingest: IngestBatch | None, num_drafted: int) -> Segments:
        """What is ingested, with anchors and masks behind it; requests that draft first."""
        masks = np.full(num_drafted - 1, self.dims.mask_token_id or 0)
        waiting: dict[int, tuple[int, Int64]] = {}
        if ingest is not None:
            found = self._ingested(ingest)
            parts = np.split(found.token_ids, found.query.cumsum()[:-1])
            waiting = dict(zip(found.rows.tolist(), zip(found.past.tolist(), parts, strict=True), strict=True))
        segments = []
        for row, length, anchor_id in zip(
            *(x.tolist() for x in (batch.rows, batch.past_lengths, batch.anchor_ids)), strict=True
        ):
            past, before = waiting.pop(row, (length, masks[:0]))
            assert past + len(before) == length, "the anchor stands behind what was ingested"
            segments.append((row, past, np.concatenate([before, [anchor_id], masks])))
        return Segments.of([*segments, *((row, *rest) for row, rest in waiting.items())])

    def _send(self, arrays: Arrays) -> Layout:
        """The index arrays of a pass that drafts nothing: the graph draws once, from any token."""
        group = arrays[bindings.group_tokens(bindings.CONTEXT)].shape
        layout = self._pass_layout(len(arrays[bindings.TOKEN_IDS]), 1, *group)
        zero = np.zeros((1, 1))
        draw = {bindings.LOGIT_ROWS: zero[0], bindings.TEMPERATURES: zero[0], bindings.UNIFORMS: zero}
        self.inputs.send((layout, {**arrays, **draw}))
        return layout

    def _ingest_tensors(self, layout: Layout, first_row: int, num_rows: int) -> Tensors:
        caches = self.cache.tensors(bindings.CONTEXT, first_row, num_rows)
        return layout.tensors(self.inputs.memory) | caches | self._block.outputs(1)

    def _block_tensors(self, call: DraftCall) -> Tensors:
        staged: Tensors = {}
        for layout, _ in call.parts:
            staged |= layout.tensors(self.inputs.memory)
        num_rows = len(staged[bindings.group_past_lengths(bindings.CONTEXT)])
        num_requests, n = bucket(call.num_requests, self.limits.max_requests), call.num_slots
        names = (bindings.DRAFT_IDS, bindings.CONFIDENCE_LOGITS)
        small = {name: self.fetched.tensors[name][:num_requests, :n] for name in names}
        logits = self._draft_logits[: num_requests * n].view(num_requests, n, -1)
        return staged | small | {bindings.DRAFT_LOGITS: logits} | self.cache.tensors(bindings.CONTEXT, 0, num_rows)

    def _make_pass_layout(self, num_tokens: int, num_draws: int, num_rows: int, num_queries: int) -> Layout:
        return pass_layout(self.dims, num_tokens, num_draws, (num_rows, num_queries))

    def _make_next_layout(self, num_requests: int, num_rows: int, num_passes: int, begin: int) -> Layout:
        return next_layout(self.dims, num_requests, num_rows, num_passes, begin)
