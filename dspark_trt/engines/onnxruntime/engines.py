"""TargetEngine and DraftEngine on ONNX Runtime's CPU provider.

Shape letters: `R` requests, `G` gamma, `T` packed tokens, `L` logit rows, `V` vocabulary, `M` tap layers, `D` hidden;
`B` KV rows of a bound range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import drafter_dims_from_metadata, target_dims_from_metadata
from dspark_trt.contract.drafter_form import slot_counts
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch, TargetBatch, TargetOutput
from dspark_trt.engines.capacity import check_rows, check_tokens
from dspark_trt.engines.onnxruntime.cache import KEYS, VALUES, CachePool
from dspark_trt.engines.onnxruntime.session import BoundArrays, GraphSession
from dspark_trt.engines.row_groups import RowGroup, positions, row_group


@dataclass(frozen=True, slots=True)
class OnnxRuntimeSettings:
    """What is chosen when engines are opened, not when graphs are written."""

    num_threads: int | None = None  # None: the cores this process may use


def open_engines(
    graphs: Path, settings: OnnxRuntimeSettings = OnnxRuntimeSettings()
) -> tuple[OnnxRuntimeTargetEngine, OnnxRuntimeDraftEngine]:
    """Open the graphs of a build.

    Raises EnvironmentMissingError without onnxruntime, EngineBuildError when a graph cannot be opened.
    """
    return OnnxRuntimeTargetEngine(graphs, settings), OnnxRuntimeDraftEngine(graphs, settings)


class OnnxRuntimeTargetEngine:
    """Verifies on target.onnx. Outputs are views of buffers that the next call overwrites."""

    def __init__(self, graphs: Path, settings: OnnxRuntimeSettings = OnnxRuntimeSettings()) -> None:
        path = graphs / bindings.TARGET_GRAPH
        self._session = GraphSession(path, num_threads=settings.num_threads)
        self._dims = target_dims_from_metadata(self._session.metadata, str(path))
        self._pool = CachePool(self._dims.cache, self._dims.element_type)
        num_tokens = self._dims.limits.max_batch_tokens
        self._logits = np.empty((num_tokens, self._dims.vocab_size), np.float32)
        self._taps = np.empty((num_tokens, self._dims.tap_width), self._dims.element_type)

    @property
    def limits(self) -> EngineLimits:
        return self._dims.limits

    @property
    def vocab_size(self) -> int:
        return self._dims.vocab_size

    def forward(self, batch: TargetBatch) -> TargetOutput:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when ONNX Runtime fails."""
        token_ids, rows, past, query = _int64(batch.token_ids, batch.rows, batch.past_lengths, batch.query_lengths)
        (logit_rows,) = _int64(batch.logit_rows)
        check_rows(self.limits, rows, past + query)
        check_tokens(self.limits, len(token_ids))
        n = batch.num_decode
        num_decode_tokens = int(query[:n].sum())
        decode = row_group(rows[:n], past[:n], query[:n])
        prefill = row_group(rows[n:], past[n:], query[n:], first_token=num_decode_tokens)
        inputs = {
            bindings.TOKEN_IDS: token_ids,
            bindings.POSITIONS: positions(past, query),
            bindings.LOGIT_ROWS: logit_rows,
            bindings.PADDED_INDICES: np.concatenate(
                [decode.padded_indices, prefill.padded_indices + decode.tokens.size]
            ),
        }
        groups = dict(zip(bindings.TARGET_GROUPS, (decode, prefill), strict=True))
        for name, group in groups.items():
            inputs |= _group_inputs(name, group)
        logits, taps = self._logits[: len(logit_rows)], self._taps[: len(token_ids)]
        outputs = {bindings.LOGITS: logits} | ({bindings.TAPS: taps} if self._dims.num_taps else {})
        key = (decode.first_row, decode.num_rows, prefill.first_row, prefill.num_rows)
        self._session.run(key, lambda: self._caches(groups), inputs, outputs)
        return TargetOutput(logits, taps)

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._pool.move_row(source, destination, num_positions)

    def _caches(self, groups: dict[str, RowGroup]) -> tuple[BoundArrays, BoundArrays]:
        arrays: dict[str, NDArray[np.floating]] = {}
        for name, group in groups.items():
            arrays |= _range(self._pool, self._dims.cache.num_layers, name, group.first_row, group.num_rows)
        return arrays, {bindings.cache_output(name): array for name, array in arrays.items()}


class OnnxRuntimeDraftEngine:
    """Drafts on the draft graphs, one for each slot count, ingests on drafter_ingest.onnx; all write into one pool."""

    def __init__(self, graphs: Path, settings: OnnxRuntimeSettings = OnnxRuntimeSettings()) -> None:
        path = graphs / bindings.DRAFT_GRAPH
        whole = GraphSession(path, num_threads=settings.num_threads)
        self._dims = drafter_dims_from_metadata(whole.metadata, str(path))
        self._drafts = {self.gamma: whole}
        for num_slots in slot_counts(self.gamma):
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

    @property
    def limits(self) -> EngineLimits:
        return self._dims.limits

    @property
    def gamma(self) -> int:
        return self._dims.gamma

    def ingest(self, batch: IngestBatch) -> None:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when ONNX Runtime fails."""
        rows, past, query = _int64(batch.rows, batch.past_lengths, batch.query_lengths)
        taps = np.ascontiguousarray(batch.taps, self._dims.element_type)
        check_rows(self.limits, rows, past + query)
        inputs: dict[str, NDArray[Any]] = {bindings.TAPS: taps, bindings.POSITIONS: positions(past, query)}
        if self._dims.attention == "standard":
            check_tokens(self.limits, len(taps))
            group = row_group(rows, past, query)
            inputs |= _group_inputs(bindings.CONTEXT, group)
            first_row, num_rows = group.first_row, group.num_rows
        else:
            inputs[bindings.ROWS] = np.repeat(rows, query)
            first_row, num_rows = 0, self.limits.max_requests
        self._ingest.run(
            (first_row, num_rows), lambda: self._caches(first_row, num_rows, [bindings.cache_output]), inputs, {}
        )

    @property
    def draft_vocab(self) -> NDArray[np.int64] | None:
        return self._draft_vocab

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when ONNX Runtime fails."""
        if ingest is not None:
            self.ingest(ingest)
        rows, anchor_ids, past = _int64(batch.rows, batch.anchor_ids, batch.past_lengths)
        check_rows(self.limits, rows, past + 1)
        num_requests, first_row = len(rows), int(rows.min())
        num_rows = int(rows.max()) - first_row + 1
        row_requests, row_query_lengths = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        row_requests[rows - first_row] = np.arange(num_requests)
        row_query_lengths[rows - first_row] = 1
        wanted = batch.uniforms.shape[1]
        num_slots = min(count for count in self._drafts if count >= wanted)
        uniforms = np.zeros((num_requests, num_slots), np.float32)
        uniforms[:, :wanted] = batch.uniforms
        inputs: dict[str, NDArray[Any]] = {
            bindings.ANCHOR_IDS: anchor_ids,
            bindings.PAST_LENGTHS: past,
            bindings.TEMPERATURES: np.ascontiguousarray(batch.temperatures, np.float32),
            bindings.UNIFORMS: uniforms,
            bindings.BLOCK_ROWS: rows - first_row,
            bindings.ROW_REQUESTS: row_requests,
            bindings.ROW_QUERY_LENGTHS: row_query_lengths,
        }
        shape = (num_requests, num_slots)
        draft_ids = _reshaped(self._draft_ids, *shape)
        confidence_logits = _reshaped(self._confidence_logits, *shape)
        outputs: dict[str, NDArray[Any]] = {
            bindings.DRAFT_IDS: draft_ids,
            bindings.CONFIDENCE_LOGITS: confidence_logits,
        }
        draft_logits = None
        if batch.wants_logits:
            draft_logits = _reshaped(self._draft_logits, *shape, self._dims.vocab_size)
            outputs[bindings.DRAFT_LOGITS] = draft_logits
        names = [bindings.cache_output]
        if self._dims.attention == "drafter":
            names.append(bindings.cache_block_output)
        key = (first_row, num_rows, int(batch.wants_logits))
        caches = partial(self._caches, first_row, num_rows, names)
        self._drafts[num_slots].run(key, caches, inputs, outputs)
        return DraftOutput(
            draft_ids[:, :wanted],
            None if draft_logits is None else draft_logits[:, :wanted],
            confidence_logits[:, :wanted],
        )

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._pool.move_row(source, destination, num_positions)

    def _caches(self, first_row: int, num_rows: int, output_names: Sequence[Any]) -> tuple[BoundArrays, BoundArrays]:
        arrays = _range(self._pool, self._dims.cache.num_layers, bindings.CONTEXT, first_row, num_rows)
        return arrays, {output(name): array for name, array in arrays.items() for output in output_names}


def _range(
    pool: CachePool, num_layers: int, group: str, first_row: int, num_rows: int
) -> dict[str, NDArray[np.floating]]:
    """Cache input names and the part of the pool that they stand for."""
    arrays = {}
    for layer in range(num_layers):
        arrays[bindings.key_cache(group, layer)] = pool.rows(layer, KEYS, first_row, num_rows)
        arrays[bindings.value_cache(group, layer)] = pool.rows(layer, VALUES, first_row, num_rows)
    return arrays


def _group_inputs(name: str, group: RowGroup) -> dict[str, NDArray[Any]]:
    return {
        bindings.group_tokens(name): group.tokens,
        bindings.group_past_lengths(name): group.past_lengths,
        bindings.group_query_lengths(name): group.query_lengths,
    }


def _reshaped(buffer: NDArray[Any], *shape: int) -> NDArray[Any]:
    """The beginning of a flat buffer."""
    return buffer[: math.prod(shape)].reshape(shape)


def _int64(*arrays: Any) -> tuple[NDArray[np.int64], ...]:
    return tuple(np.ascontiguousarray(array, np.int64) for array in arrays)
