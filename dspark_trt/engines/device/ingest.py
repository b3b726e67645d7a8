"""Calls of drafter_ingest.onnx: committed positions enter the drafter's context.

Shape letters: `R` segments, `T` packed context tokens, `M` tap layers, `D` hidden; `B` KV rows and `S` padded query
length of a row group.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.protocol import IngestBatch
from dspark_trt.engines.capacity import check_rows, check_tokens
from dspark_trt.engines.device.buckets import bucket, padded, padded_with_last, prefill_runs
from dspark_trt.engines.device.buffers import Arrays, Layout, StagedInputs
from dspark_trt.engines.device.cache import DeviceCache
from dspark_trt.engines.device.calls import group_arrays
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.graphs import BucketCalls, Capture
from dspark_trt.engines.device.row_states import STATE_ROWS
from dspark_trt.engines.device.session import DeviceSession
from dspark_trt.engines.row_groups import Int64, positions, row_group


class IngestCalls:
    """What a verification committed goes in calls of bucket sizes, prompts go as they are.

    Taps may be of any float type; on the device they stay there.
    """

    def __init__(
        self,
        session: DeviceSession,
        dims: DrafterDims,
        cache: DeviceCache,
        device: torch.device,
        *,
        capture: Capture | None,
    ) -> None:
        self._session = session
        self._calls = BucketCalls(session, capture)
        self._dims = dims
        self._cache = cache
        self._device = device
        self._layout = lru_cache(maxsize=256)(self._make_layout)
        limits = dims.limits
        self._most_committed = bucket(
            min(limits.max_requests * (dims.gamma + 1), limits.max_batch_tokens), limits.max_batch_tokens
        )
        dtype = getattr(torch, dims.element_type)
        self._taps = torch.zeros((self._most_committed, dims.tap_width), dtype=dtype, device=device)

    def ingest(self, batch: IngestBatch, inputs: StagedInputs) -> None:
        """`inputs`: where index arrays stand.

        Raises CapacityError when the batch exceeds the limits, EngineBuildError when the backend fails.
        """
        rows, past, query = batch.rows, batch.past_lengths, batch.query_lengths
        limits, gamma, num_tokens = self._dims.limits, self._dims.gamma, int(query.sum())
        check_rows(limits, rows, past + query)
        check_tokens(limits, num_tokens)
        ids = self._ids(batch)
        with torch_errors("drafter, ingest"):
            taps = torch.as_tensor(batch.taps)
            self._cache.prepare(rows, past, max(int(query.max()), gamma + 1))
            if query.max() <= gamma + 1 and num_tokens <= self._most_committed:
                self._ingest_bucket(taps, ids, rows, past, query, inputs)
                return
            taps = taps.to(self._device, self._taps.dtype).contiguous()
            begin = 0
            for first, last in prefill_runs(rows, query, limits.max_batch_tokens):
                part = slice(first, last)
                end = begin + int(query[part].sum())
                tokens = slice(begin, end)
                self._ingest_whole(
                    taps[tokens], ids if ids is None else ids[tokens], rows[part], past[part], query[part], inputs
                )
                begin = end

    def most_input_bytes(self) -> int:
        limits = self._dims.limits
        rows, tokens = limits.max_requests, limits.max_batch_tokens
        return self._make_layout(tokens, rows, max(self._dims.gamma + 1, -(-tokens // rows)), rows).end

    def _ids(self, batch: IngestBatch) -> Int64 | None:
        """What the drafter's family reads of each position beside its taps."""
        if self._dims.ingested_ids == "none":
            return None
        ids = batch.token_ids if self._dims.ingested_ids == "token" else batch.next_ids
        assert ids is not None, "the runtime gives the ids of what it commits"
        return ids

    def _ingest_bucket(
        self, taps: torch.Tensor, ids: Int64 | None, rows: Int64, past: Int64, query: Int64, inputs: StagedInputs
    ) -> None:
        """What a verification committed: up to gamma + 1 tokens a row."""
        limits, num_tokens = self._dims.limits, len(taps)
        most = limits.max_requests
        num_padded, num_rows = bucket(num_tokens, self._most_committed), bucket(int(rows.max()) + 1, most)
        num_segments = bucket(len(rows), most) if self._dims.row_state_width else 1
        group = row_group(rows, past, query, padded_to=(num_rows, self._dims.gamma + 1))
        layout = self._layout(num_padded, *group.tokens.shape, num_segments)
        arrays: dict[str, Any] = group_arrays(bindings.CONTEXT, group)
        arrays[bindings.POSITIONS] = padded(positions(past, query), num_padded)
        arrays[bindings.LAST_TOKENS] = padded_with_last(query.cumsum() - 1, num_segments)
        arrays[STATE_ROWS.name] = padded_with_last(rows, num_segments)
        if ids is not None:
            arrays[bindings.TOKEN_IDS] = padded(ids, num_padded)
        self._send(layout, arrays, inputs)
        self._taps[:num_tokens].copy_(taps, non_blocking=True)
        self._calls(
            (num_padded, num_rows, num_segments),
            lambda: (
                layout.tensors(inputs.memory)
                | {bindings.TAPS: self._taps[:num_padded]}
                | self._cache.tensors(bindings.CONTEXT, 0, num_rows)
            ),
        )

    def _ingest_whole(
        self, taps: torch.Tensor, ids: Int64 | None, rows: Int64, past: Int64, query: Int64, inputs: StagedInputs
    ) -> None:
        """A prompt's taps, as they are."""
        group = row_group(rows, past, query)
        layout = self._layout(len(taps), *group.tokens.shape, len(rows))
        arrays: dict[str, Any] = group_arrays(bindings.CONTEXT, group)
        arrays |= {bindings.POSITIONS: positions(past, query), bindings.LAST_TOKENS: query.cumsum() - 1}
        arrays[STATE_ROWS.name] = rows
        if ids is not None:
            arrays[bindings.TOKEN_IDS] = ids
        self._send(layout, arrays, inputs)
        self._session.run(
            layout.tensors(inputs.memory)
            | {bindings.TAPS: taps}
            | self._cache.tensors(bindings.CONTEXT, group.first_row, group.num_rows)
        )

    def _send(self, layout: Layout, arrays: Arrays, inputs: StagedInputs) -> None:
        """Of the arrays, those that the family's graph reads."""
        inputs.send((layout, {name: arrays[name] for name in layout.names}))

    def _make_layout(self, num_tokens: int, num_rows: int, num_queries: int, num_segments: int) -> Layout:
        dims = self._dims
        tensors = [each for each in bindings.ingest_inputs(dims) if each.name != bindings.TAPS]
        tensors = [each for each in tensors if not bindings.is_cache(each.name)]
        if dims.row_state_width:
            tensors.append(STATE_ROWS)
        extents = {"T": num_tokens, "R": num_segments}
        return Layout(tensors, extents | {f"B_{bindings.CONTEXT}": num_rows, f"S_{bindings.CONTEXT}": num_queries})
