"""DraftEngine on ONNX Runtime's CPU provider for language models that draft (drafter_model.onnx).

The first pass of a block reads what is to be ingested and the anchors together, so that ingesting costs no pass of its
own. Each further draft is a pass over the draft before it; with a mask token, the first pass makes all drafts.

Shape letters: `R` requests, `n` slots, `T` packed tokens, `W` draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import drafter_dims_from_metadata
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch
from dspark_trt.engines.capacity import check_rows, check_tokens
from dspark_trt.engines.onnxruntime.arrays import cache_range, group_inputs, int64, reshaped
from dspark_trt.engines.onnxruntime.cache import CachePool
from dspark_trt.engines.onnxruntime.session import DEFAULT_SETTINGS, BoundArrays, GraphSession, OnnxRuntimeSettings
from dspark_trt.engines.row_groups import positions, row_group

_Drafts = dict[str, NDArray[Any]]  # ids, confidences and, where they are wanted, logits, by the names of `bindings`


class _Segment(NamedTuple):
    """Consecutive tokens of one row."""

    row: int
    past_length: int
    token_ids: NDArray[np.int64]


class _Draws(NamedTuple):
    """What is drafted by one pass, [L] and uniforms [L, 1]."""

    logit_rows: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    uniforms: NDArray[np.float32]
    wants_logits: bool


class OnnxRuntimeLanguageModelEngine:
    """All calls run one graph, which is opened once. Outputs are views of buffers that the next call overwrites."""

    def __init__(self, graphs: Path, settings: OnnxRuntimeSettings = DEFAULT_SETTINGS) -> None:
        path = graphs / bindings.MODEL_GRAPH
        self._session = GraphSession(path, num_threads=settings.num_threads)
        self._dims = drafter_dims_from_metadata(self._session.metadata, str(path))
        self._pool = CachePool(self._dims.cache, self._dims.element_type)
        vocab = graphs / bindings.DRAFT_VOCAB_FILE
        self._draft_vocab = np.load(vocab, allow_pickle=False) if vocab.exists() else None
        count = self.limits.max_requests * self.gamma
        self._of_pass, self._of_block = (_buffers(count, self._dims.vocab_size) for _ in range(2))

    @property
    def limits(self) -> EngineLimits:
        return self._dims.limits

    @property
    def gamma(self) -> int:
        return self._dims.gamma

    @property
    def draft_vocab(self) -> NDArray[np.int64] | None:
        return self._draft_vocab

    def ingest(self, batch: IngestBatch) -> None:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when ONNX Runtime fails."""
        # the graph draws at least once
        nothing = _Draws(np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros((1, 1), np.float32), False)
        self._run(self._segments(batch), nothing)

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        """Raises CapacityError when the batch exceeds the limits, EngineBuildError when ONNX Runtime fails."""
        rows, past = int64(batch.rows, batch.past_lengths)
        check_rows(self.limits, rows, past + 1)
        num_requests, num_slots = batch.uniforms.shape
        temperatures = np.ascontiguousarray(batch.temperatures, np.float32)
        uniforms = np.ascontiguousarray(batch.uniforms, np.float32)
        segments, num_drafted = self._first_segments(batch, ingest)
        ends = np.cumsum([len(segment.token_ids) for segment in segments[:num_requests]])
        first = _Draws(
            (ends[:, None] - num_drafted + np.arange(num_drafted)).reshape(-1),
            np.repeat(temperatures, num_drafted),
            uniforms[:, :num_drafted].reshape(-1, 1),
            batch.wants_logits,
        )
        drafts = self._run(segments, first)
        if num_drafted == num_slots:
            return _output(drafts, num_requests, num_slots)
        block = self._block(num_requests, num_slots, wants_logits=batch.wants_logits)
        for slot in range(num_slots):
            if slot:
                token_ids = block[bindings.DRAFT_IDS][:, slot - 1]
                segments = [
                    _Segment(row, length + slot, token_ids[at : at + 1])
                    for at, (row, length) in enumerate(zip(rows.tolist(), past.tolist(), strict=True))
                ]
                draws = _Draws(np.arange(num_requests), temperatures, uniforms[:, slot : slot + 1], batch.wants_logits)
                drafts = self._run(segments, draws)
            for name, array in block.items():
                array[:, slot : slot + 1] = drafts[name]
        return _output(block, num_requests, num_slots)

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._pool.move_row(source, destination, num_positions)

    def _segments(self, batch: IngestBatch) -> list[_Segment]:
        """Raises CapacityError when the batch exceeds the limits."""
        assert batch.token_ids is not None, "the runtime gives the ids of what it commits"
        token_ids, rows, past, query = int64(batch.token_ids, batch.rows, batch.past_lengths, batch.query_lengths)
        check_rows(self.limits, rows, past + query)
        check_tokens(self.limits, len(token_ids))
        parts = np.split(token_ids, query.cumsum()[:-1])
        return [_Segment(*each) for each in zip(rows.tolist(), past.tolist(), parts, strict=True)]

    def _first_segments(self, batch: DraftBatch, ingest: IngestBatch | None) -> tuple[list[_Segment], int]:
        """What is ingested, with anchors, and masks, behind it; requests that draft first. And how many drafts each of
        these gets by it."""
        mask = self._dims.mask_token_id
        masks = np.full(0 if mask is None else batch.uniforms.shape[1] - 1, mask or 0)
        waiting = {} if ingest is None else {segment.row: segment for segment in self._segments(ingest)}
        segments = []
        for row, length, anchor_id in zip(
            *(x.tolist() for x in (batch.rows, batch.past_lengths, batch.anchor_ids)), strict=True
        ):
            before = waiting.pop(row, None) or _Segment(row, length, masks[:0])
            assert before.past_length + len(before.token_ids) == length, "the anchor stands behind what was ingested"
            segments.append(before._replace(token_ids=np.concatenate([before.token_ids, [anchor_id], masks])))
        return [*segments, *waiting.values()], 1 + len(masks)

    def _run(self, segments: Sequence[_Segment], draws: _Draws) -> _Drafts:
        """One pass. Its outputs are overwritten by the next one."""
        rows, past, query = (
            np.array(each, np.int64)
            for each in zip(*((s.row, s.past_length, len(s.token_ids)) for s in segments), strict=True)
        )
        group = row_group(rows, past, query)
        inputs: dict[str, NDArray[Any]] = {
            bindings.TOKEN_IDS: np.concatenate([segment.token_ids for segment in segments]),
            bindings.POSITIONS: positions(past, query),
            bindings.PADDED_INDICES: group.padded_indices,
            bindings.LOGIT_ROWS: draws.logit_rows,
            bindings.TEMPERATURES: draws.temperatures,
            bindings.UNIFORMS: np.ascontiguousarray(draws.uniforms),
            **group_inputs(bindings.CONTEXT, group),
        }
        outputs = _arrays(self._of_pass, len(draws.logit_rows), 1, self._dims.vocab_size, draws.wants_logits)
        key = (group.first_row, group.num_rows, int(draws.wants_logits))
        self._session.run(key, lambda: self._caches(group.first_row, group.num_rows), inputs, outputs)
        return outputs

    def _block(self, num_requests: int, num_slots: int, *, wants_logits: bool) -> _Drafts:
        return _arrays(self._of_block, num_requests, num_slots, self._dims.vocab_size, wants_logits)

    def _caches(self, first_row: int, num_rows: int) -> tuple[BoundArrays, BoundArrays]:
        arrays = cache_range(self._pool, self._dims.cache.num_layers, bindings.CONTEXT, first_row, num_rows)
        return arrays, {bindings.cache_output(name): array for name, array in arrays.items()}


def _buffers(count: int, vocab_size: int) -> _Drafts:
    """Flat, for `count` drafts."""
    return {
        bindings.DRAFT_IDS: np.empty(count, np.int64),
        bindings.CONFIDENCE_LOGITS: np.empty(count, np.float32),
        bindings.DRAFT_LOGITS: np.empty(count * vocab_size, np.float32),
    }


def _arrays(buffers: _Drafts, num_rows: int, num_slots: int, vocab_size: int, wants_logits: bool) -> _Drafts:
    """[L, n] of each, logits [L, n, W] where they are wanted."""
    return {
        name: reshaped(buffer, num_rows, num_slots, *([vocab_size] if name == bindings.DRAFT_LOGITS else []))
        for name, buffer in buffers.items()
        if wants_logits or name != bindings.DRAFT_LOGITS
    }


def _output(drafts: _Drafts, num_requests: int, num_slots: int) -> DraftOutput:
    shaped = {name: array.reshape(num_requests, num_slots, *array.shape[2:]) for name, array in drafts.items()}
    return DraftOutput(
        shaped[bindings.DRAFT_IDS], shaped.get(bindings.DRAFT_LOGITS), shaped[bindings.CONFIDENCE_LOGITS]
    )
