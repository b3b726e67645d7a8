"""The step table: measured milliseconds of a verification step over batch_tokens x requests.

Source: paper section 3.2.2 (SPS(B), "steps per second"); stored as milliseconds, SPS = 1000 / step_ms.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import ManifestError

SCHEMA_VERSION = 1


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in least squares (pool adjacent violators).

    A step of more tokens is never priced below one of fewer; a noisy point pulls its neighbours by its share only.
    """
    pools: list[tuple[float, int]] = []  # mean, number of values
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


@dataclass(frozen=True)
class StepTable:
    """Medians of measured steps.

    `step_ms[i][j]` is the median for `num_requests[i]` requests and `batch_tokens[j]` packed tokens; None where
    batch_tokens < num_requests (there is no such step) and where the profiler did not measure.
    """

    num_requests: tuple[int, ...]  # ascending
    batch_tokens: tuple[int, ...]  # ascending
    step_ms: tuple[tuple[float | None, ...], ...]
    draft_ms: tuple[float, ...]  # one draft block, by num_requests
    provenance: dict[str, Any]

    @cached_property
    def _dense(self) -> dict[int, NDArray[np.float64]]:
        """Per measured request count: step_ms at every batch_tokens from 0 to the last of the table.

        Beyond the last measured point of a request count, tokens cost what they add for the first request count.
        """
        curves: dict[int, NDArray[np.float64]] = {}
        for requests, row in zip(self.num_requests, self.step_ms, strict=True):
            known = [(b, ms) for b, ms in zip(self.batch_tokens, row, strict=True) if ms is not None]
            tokens, values = zip(*known, strict=True)
            curve = np.interp(np.arange(tokens[-1] + 1.0), tokens, isotonic(values))
            if curves:
                first = curves[self.num_requests[0]]
                curve = np.append(curve, curve[-1] + first[len(curve) :] - first[min(len(curve), len(first)) - 1])
            curves[requests] = curve
        return curves

    def curve(self, num_requests: int, first: int, last: int) -> NDArray[np.float64]:
        """step_ms at batch_tokens first..last inclusive, [last - first + 1] float64.

        Request counts between two measured ones take the higher (a step is never priced too low); tokens beyond the
        table are extrapolated with the mean slope of its second half.
        """
        at = min(bisect_left(self.num_requests, num_requests), len(self.num_requests) - 1)
        curve = self._dense[self.num_requests[at]]
        tokens = np.arange(first, last + 1)
        inside = curve[np.minimum(tokens, len(curve) - 1)]
        half = len(curve) // 2
        slope = (curve[-1] - curve[half]) / max(len(curve) - 1 - half, 1)
        beyond = np.maximum(tokens - (len(curve) - 1), 0)
        return np.asarray(inside + beyond * slope, dtype=np.float64)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> StepTable:
        """Raises ManifestError when the file is missing or of another schema."""
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise ManifestError(f"no step table at {path}; run `dspark-trt build` again") from None
        if data.pop("schema_version", None) != SCHEMA_VERSION:
            raise ManifestError(f"{path}: expected step table schema {SCHEMA_VERSION}; run `dspark-trt build` again")
        return cls(
            num_requests=tuple(data["num_requests"]),
            batch_tokens=tuple(data["batch_tokens"]),
            step_ms=tuple(tuple(row) for row in data["step_ms"]),
            draft_ms=tuple(data["draft_ms"]),
            provenance=data["provenance"],
        )
