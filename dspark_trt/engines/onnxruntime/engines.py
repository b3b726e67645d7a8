"""TargetEngine on ONNX Runtime's CPU provider, and both engines of a build.

Shape letters: `R` requests, `G` gamma, `T` packed tokens, `L` logit rows, `V` vocabulary, `M` tap layers, `D` hidden;
`B` KV rows of a bound range.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import target_dims_from_metadata
from dspark_trt.contract.protocol import DraftEngine, EngineLimits, TargetBatch, TargetOutput
from dspark_trt.engines.capacity import check_rows, check_tokens
from dspark_trt.engines.onnxruntime.arrays import cache_range, group_inputs, int64
from dspark_trt.engines.onnxruntime.cache import CachePool
from dspark_trt.engines.onnxruntime.drafter import OnnxRuntimeDraftEngine
from dspark_trt.engines.onnxruntime.language_model import OnnxRuntimeLanguageModelEngine
from dspark_trt.engines.onnxruntime.session import DEFAULT_SETTINGS, BoundArrays, GraphSession, OnnxRuntimeSettings
from dspark_trt.engines.row_groups import RowGroup, positions, row_group

PaddedTokens = Callable[[int, int], int]  # requests and packed tokens of a call -> packed tokens that it is given

__all__ = [
    "OnnxRuntimeDraftEngine",
    "OnnxRuntimeSettings",
    "OnnxRuntimeTargetEngine",
    "open_draft_engine",
    "open_engines",
]


def open_engines(
    graphs: Path, settings: OnnxRuntimeSettings = DEFAULT_SETTINGS
) -> tuple[OnnxRuntimeTargetEngine, DraftEngine]:
    """Open the graphs of a build.

    Raises EnvironmentMissingError without onnxruntime, EngineBuildError when a graph cannot be opened.
    """
    return OnnxRuntimeTargetEngine(graphs, settings), open_draft_engine(graphs, settings)


def open_draft_engine(graphs: Path, settings: OnnxRuntimeSettings = DEFAULT_SETTINGS) -> DraftEngine:
    """A language model has one graph, every other drafter two and more. Raises as `open_engines` does."""
    if (graphs / bindings.MODEL_GRAPH).exists():
        return OnnxRuntimeLanguageModelEngine(graphs, settings)
    return OnnxRuntimeDraftEngine(graphs, settings)


class OnnxRuntimeTargetEngine:
    """Verifies on target.onnx. Outputs are views of buffers that the next call overwrites."""

    def __init__(self, graphs: Path, settings: OnnxRuntimeSettings = DEFAULT_SETTINGS) -> None:
        path = graphs / bindings.TARGET_GRAPH
        self._session = GraphSession(path, num_threads=settings.num_threads)
        self._dims = target_dims_from_metadata(self._session.metadata, str(path))
        self._pool = CachePool(self._dims.cache, self._dims.element_type)
        num_tokens = self._dims.limits.max_batch_tokens
        self._logits = np.empty((num_tokens, self._dims.vocab_size), np.float32)
        self._taps = np.empty((num_tokens, self._dims.tap_width), self._dims.element_type)
        self._padded_tokens: PaddedTokens = lambda num_requests, num_tokens: num_tokens

    def pad_calls(self, padded_tokens: PaddedTokens) -> None:
        """Give calls as many packed tokens as `padded_tokens` says; those behind the batch's own are of no row."""
        self._padded_tokens = padded_tokens

    @property
    def limits(self) -> EngineLimits:
        return self._dims.limits

    @property
    def vocab_size(self) -> int:
        return self._dims.vocab_size

    def forward(self, batch: TargetBatch) -> TargetOutput:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when ONNX Runtime fails."""
        token_ids, rows, past, query = int64(batch.token_ids, batch.rows, batch.past_lengths, batch.query_lengths)
        (logit_rows,) = int64(batch.logit_rows)
        check_rows(self.limits, rows, past + query)
        check_tokens(self.limits, len(token_ids))
        n = batch.num_decode
        num_decode_tokens = int(query[:n].sum())
        least = self._dims.min_query_length
        decode = row_group(rows[:n], past[:n], query[:n], min_query_length=least)
        prefill = row_group(rows[n:], past[n:], query[n:], first_token=num_decode_tokens, min_query_length=least)
        num_tokens = min(self._padded_tokens(len(rows), len(token_ids)), self.limits.max_batch_tokens)
        padding = np.zeros(max(num_tokens - len(token_ids), 0), np.int64)
        inputs = {
            bindings.TOKEN_IDS: np.concatenate([token_ids, padding]),
            bindings.POSITIONS: np.concatenate([positions(past, query), padding]),
            bindings.LOGIT_ROWS: logit_rows,
            bindings.PADDED_INDICES: np.concatenate(
                [decode.padded_indices, prefill.padded_indices + decode.tokens.size, padding]
            ),
        }
        groups = dict(zip(bindings.TARGET_GROUPS, (decode, prefill), strict=True))
        for name, group in groups.items():
            inputs |= group_inputs(name, group)
        inputs |= self._further_inputs()
        logits, taps = self._logits[: len(logit_rows)], self._taps[: len(token_ids) + len(padding)]
        outputs = {bindings.LOGITS: logits} | ({bindings.TAPS: taps} if self._dims.num_taps else {})
        key = (decode.first_row, decode.num_rows, prefill.first_row, prefill.num_rows)
        self._session.run(key, lambda: self._caches(groups), inputs, outputs)
        return TargetOutput(logits, taps[: len(token_ids)])

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._pool.move_row(source, destination, num_positions)

    def _further_inputs(self) -> dict[str, NDArray[np.float32]]:
        return {}

    def _caches(self, groups: dict[str, RowGroup]) -> tuple[BoundArrays, BoundArrays]:
        arrays: dict[str, NDArray[np.floating]] = {}
        for name, group in groups.items():
            arrays |= cache_range(self._pool, self._dims.cache.num_layers, name, group.first_row, group.num_rows)
        return arrays, {bindings.cache_output(name): array for name, array in arrays.items()}
