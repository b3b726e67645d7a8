"""DraftEngine on ONNX Runtime's CPU provider, for every family of drafters.

Shape letters: `R` requests, `G` gamma, `V` vocabulary, `X` width of a row state; `B` KV rows of a bound range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import drafter_dims_from_metadata
from dspark_trt.contract.draft_bindings import draft_cache_outputs
from dspark_trt.contract.drafter_form import slot_counts
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch
from dspark_trt.engines.capacity import check_rows, check_tokens
from dspark_trt.engines.onnxruntime.arrays import cache_range, group_inputs, int64, reshaped
from dspark_trt.engines.onnxruntime.cache import CachePool
from dspark_trt.engines.onnxruntime.session import DEFAULT_SETTINGS, BoundArrays, GraphSession, OnnxRuntimeSettings
from dspark_trt.engines.row_groups import positions, row_group


class OnnxRuntimeDraftEngine:
    """Drafts on the draft graphs, one for each slot count, ingests on drafter_ingest.onnx; all write into one pool.

    Knows no family: what the graphs take and give is in their dims.
    """

    def __init__(self, graphs: Path, settings: OnnxRuntimeSettings = DEFAULT_SETTINGS) -> None:
        path = graphs / bindings.DRAFT_GRAPH
        whole = GraphSession(path, num_threads=settings.num_threads)
        self._dims = drafter_dims_from_metadata(whole.metadata, str(path))
        self._drafts = {self.gamma: whole}
        for num_slots in () if self._dims.is_slot_by_slot else slot_counts(self.gamma):
            short = graphs / bindings.draft_graph(num_slots, self.gamma)
            if num_slots < self.gamma and short.exists():
                self._drafts[num_slots] = GraphSession(short, num_threads=settings.num_threads)
        self._ingest = GraphSession(graphs / bindings.INGEST_GRAPH, num_threads=settings.num_threads)
        self._pool = CachePool(self._dims.cache, self._dims.element_type)
        vocab = graphs / bindings.DRAFT_VOCAB_FILE
        self._draft_vocab = np.load(vocab, allow_pickle=False) if vocab.exists() else None
        blocks = self._dims.limits.max_requests * self.gamma
        self._draft_ids = np.empty(blocks, np.int64)
        self._draft_logits = np.empty(blocks * self._dims.vocab_size, np.float32)
        self._confidence_logits = np.empty(blocks, np.float32)
        # what is kept of each row's last ingested position, [rows, X]
        self._row_states = np.zeros((self.limits.max_requests, self._dims.row_state_width), self._dims.row_state_type)

    @property
    def limits(self) -> EngineLimits:
        return self._dims.limits

    @property
    def gamma(self) -> int:
        return self._dims.gamma

    def ingest(self, batch: IngestBatch) -> None:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when ONNX Runtime fails."""
        rows, past, query = int64(batch.rows, batch.past_lengths, batch.query_lengths)
        check_rows(self.limits, rows, past + query)
        inputs = self._ingested(batch)
        first_row, num_rows = 0, self.limits.max_requests
        if self._dims.cache.num_layers:
            inputs[bindings.POSITIONS] = positions(past, query)
        if self._dims.attention == "drafter" and self._dims.cache.num_layers:
            inputs[bindings.ROWS] = np.repeat(rows, query)
        elif self._dims.cache.num_layers:
            check_tokens(self.limits, int(query.sum()))
            group = row_group(rows, past, query)
            inputs |= group_inputs(bindings.CONTEXT, group)
            first_row, num_rows = group.first_row, group.num_rows
        outputs: dict[str, NDArray[Any]] = {}
        if self._dims.row_state_width:
            inputs[bindings.LAST_TOKENS] = query.cumsum() - 1
            outputs[bindings.LAST_STATES] = np.empty((len(rows), self._dims.row_state_width), self._dims.row_state_type)
        self._ingest.run(
            (first_row, num_rows), partial(self._caches, first_row, num_rows, _ingest_outputs), inputs, outputs
        )
        if outputs:
            self._row_states[rows] = outputs[bindings.LAST_STATES]

    def _ingested(self, batch: IngestBatch) -> dict[str, NDArray[Any]]:
        """What the drafter's family reads of each position."""
        inputs: dict[str, NDArray[Any]] = {}
        if self._dims.num_taps:
            inputs[bindings.TAPS] = np.ascontiguousarray(batch.taps, self._dims.element_type)
        if self._dims.ingested_ids != "none":
            ids = batch.token_ids if self._dims.ingested_ids == "token" else batch.next_ids
            assert ids is not None, "the runtime gives the ids of what it commits"
            (inputs[bindings.TOKEN_IDS],) = int64(ids)
        return inputs

    @property
    def draft_vocab(self) -> NDArray[np.int64] | None:
        return self._draft_vocab

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when ONNX Runtime fails."""
        rows, anchor_ids, past = int64(batch.rows, batch.anchor_ids, batch.past_lengths)
        context: dict[str, NDArray[Any]] = {}
        if self._dims.ingests_in_draft:
            context = self._context(ingest)
        elif ingest is not None:
            self.ingest(ingest)
        check_rows(self.limits, rows, past + 1)
        wanted = batch.uniforms.shape[1]
        num_slots = wanted if self._dims.is_slot_by_slot else min(count for count in self._drafts if count >= wanted)
        uniforms = np.zeros((len(rows), num_slots), np.float32)
        uniforms[:, :wanted] = batch.uniforms
        shape = (len(rows), num_slots)
        drafts = {bindings.DRAFT_IDS: reshaped(self._draft_ids, *shape)}
        drafts[bindings.CONFIDENCE_LOGITS] = reshaped(self._confidence_logits, *shape)
        if batch.wants_logits:
            drafts[bindings.DRAFT_LOGITS] = reshaped(self._draft_logits, *shape, self._dims.vocab_size)
        inputs: dict[str, NDArray[Any]] = {
            bindings.ANCHOR_IDS: anchor_ids,
            bindings.TEMPERATURES: np.ascontiguousarray(batch.temperatures, np.float32),
            **context,
        }
        if self._dims.row_state_width:
            inputs[bindings.ROW_STATES] = self._row_states[rows]
        if self._dims.is_slot_by_slot:
            self._draft_in_turn(rows, past, uniforms, inputs, drafts)
        else:
            self._run_draft(num_slots, rows, past, inputs | {bindings.UNIFORMS: uniforms}, drafts)
        logits = drafts.get(bindings.DRAFT_LOGITS)
        return DraftOutput(
            drafts[bindings.DRAFT_IDS][:, :wanted],
            None if logits is None else logits[:, :wanted],
            drafts[bindings.CONFIDENCE_LOGITS][:, :wanted],
        )

    def _context(self, batch: IngestBatch | None) -> dict[str, NDArray[Any]]:
        """What a draft graph takes in before it drafts, with rows of the whole pool; of no token without `batch`."""
        if batch is None:
            none = np.empty(0, np.int64)
            taps = np.empty((0, self._dims.tap_width), self._dims.element_type)
            return {bindings.TAPS: taps, bindings.POSITIONS: none, bindings.ROWS: none}
        rows, past, query = int64(batch.rows, batch.past_lengths, batch.query_lengths)
        check_rows(self.limits, rows, past + query)
        places = {bindings.POSITIONS: positions(past, query), bindings.ROWS: np.repeat(rows, query)}
        return self._ingested(batch) | places

    def _draft_in_turn(
        self,
        rows: NDArray[np.int64],
        past: NDArray[np.int64],
        uniforms: NDArray[np.float32],
        inputs: dict[str, NDArray[Any]],
        drafts: dict[str, NDArray[Any]],
    ) -> None:
        """A call for each slot, which begins where the one before it ended."""
        states = np.empty((len(rows), self._dims.row_state_width), self._dims.row_state_type)
        for slot in range(uniforms.shape[1]):
            inputs[bindings.UNIFORMS] = uniforms[:, slot : slot + 1].copy()
            found = {name: array[:, :1].copy() for name, array in drafts.items()}
            self._run_draft(self.gamma, rows, past + slot, inputs, {**found, bindings.LAST_STATES: states})
            for name, array in found.items():
                drafts[name][:, slot : slot + 1] = array
            inputs |= {bindings.ANCHOR_IDS: found[bindings.DRAFT_IDS][:, 0].copy(), bindings.ROW_STATES: states.copy()}

    def _run_draft(
        self,
        num_slots: int,
        rows: NDArray[np.int64],
        past: NDArray[np.int64],
        inputs: dict[str, NDArray[Any]],
        outputs: dict[str, NDArray[Any]],
    ) -> None:
        """One call of the graph of num_slots, on the rows that draft or take something in."""
        involved = np.concatenate([rows, inputs[bindings.ROWS]]) if bindings.ROWS in inputs else rows
        first_row = int(involved.min())
        num_rows = int(involved.max()) - first_row + 1
        if bindings.ROWS in inputs:
            inputs = inputs | {bindings.ROWS: inputs[bindings.ROWS] - first_row}
        row_requests, row_query_lengths = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        row_requests[rows - first_row] = np.arange(len(rows))
        row_query_lengths[rows - first_row] = 1
        if self._dims.cache.num_layers:
            inputs = inputs | {
                bindings.PAST_LENGTHS: past,
                bindings.BLOCK_ROWS: rows - first_row,
                bindings.ROW_REQUESTS: row_requests,
                bindings.ROW_QUERY_LENGTHS: row_query_lengths,
            }
        names = partial(draft_cache_outputs, dims=replace(self._dims, gamma=num_slots))
        key = (first_row, num_rows, int(bindings.DRAFT_LOGITS in outputs))
        self._drafts[num_slots].run(key, partial(self._caches, first_row, num_rows, names), inputs, outputs)

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._pool.move_row(source, destination, num_positions)
        self._row_states[destination] = self._row_states[source]

    def _caches(
        self, first_row: int, num_rows: int, outputs_of: Callable[[str], tuple[str, ...]]
    ) -> tuple[BoundArrays, BoundArrays]:
        arrays = cache_range(self._pool, self._dims.cache.num_layers, bindings.CONTEXT, first_row, num_rows)
        return arrays, {output: array for name, array in arrays.items() for output in outputs_of(name)}


def _ingest_outputs(cache: str) -> tuple[str, ...]:
    return (bindings.cache_output(cache),)
