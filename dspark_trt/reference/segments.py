"""What the reference's engines do with arrays, limits and rows: a call is computed segment by segment."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from dspark_trt.contract.protocol import EngineLimits, IngestBatch, TargetBatch
from dspark_trt.errors import CapacityError
from dspark_trt.reference.model import ReferenceCache, ReferenceDecoder


class Segment(NamedTuple):
    """One request's part of a call: packed tokens [begin, end), at positions [past, past + end - begin) of `row`."""

    row: int
    past: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.past + self.end - self.begin


class ReferenceEngine:
    """What both engines do with arrays and limits."""

    def __init__(self, decoder: ReferenceDecoder, limits: EngineLimits) -> None:
        self.limits = limits
        self._decoder = decoder
        self._device = decoder.weights.device
        self._cache = ReferenceCache(decoder.spec, limits.max_requests, limits.max_seq_len, self._device)

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._cache.move_row(source, destination, num_positions)

    def _tensor(self, array: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(array, dtype=dtype, device=self._device)

    def _output(self, tensor: torch.Tensor) -> NDArray[Any]:
        array: NDArray[Any] = tensor.cpu().numpy()
        return array

    def _segments(self, batch: TargetBatch | IngestBatch) -> list[Segment]:
        lengths, rows, past = batch.query_lengths.tolist(), batch.rows.tolist(), batch.past_lengths.tolist()
        ends = accumulate(lengths)
        segments = [
            Segment(row, start, end - length, end)
            for row, start, length, end in zip(rows, past, lengths, ends, strict=True)
        ]
        for segment in segments:
            if segment.length > self.limits.max_seq_len or not 0 <= segment.row < self.limits.max_requests:
                raise CapacityError(
                    f"reference engine: expected rows below {self.limits.max_requests} of at most "
                    f"{self.limits.max_seq_len} positions, found row {segment.row} with {segment.length}; raise "
                    "max_requests or max_seq_len"
                )
        return segments

    def _positions(self, segments: Iterable[Segment]) -> torch.Tensor:
        return torch.cat([torch.arange(s.past, s.length, device=self._device) for s in segments])
