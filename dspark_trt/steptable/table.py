"""The step table: what steps cost on this machine, measured (paper section 3.2.2; SPS = 1000 / step_ms).

Shape letters: `C` context depths, `R` request counts, `X` extra tokens, `N` slot counts. All times are milliseconds.

A step of the target packs one token of each request and `extra_tokens` more: drafts and prompt tokens. Between measured
points prices are interpolated linearly, so that no token is ever free, except where calls are padded to the measured
sizes (`is_padded`): there the padded size is what is paid.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import ManifestError, abridged, place
from dspark_trt.steptable.padding import padded_points, token_buckets

SCHEMA_VERSION = 2
CONTEXT_STEP = 32  # prices are computed for context depths rounded to so many positions
Floats = NDArray[np.float64]


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


@dataclass(frozen=True, eq=False)
class StepTable:
    """Medians of measured calls; None where nothing was measured. `steptable/step_table.json` holds it."""

    num_requests: tuple[int, ...]  # R, ascending
    extra_tokens: tuple[int, ...]  # X, ascending from 0
    step_ms: tuple[tuple[tuple[float | None, ...], ...], ...]  # [C][R][X]; for X = 0 at every depth and request count
    draft_ms: tuple[tuple[tuple[float, ...], ...], ...]  # [C][R][N]
    context_tokens: tuple[int, ...] = (0,)  # C, ascending: positions that every request holds
    num_slots: tuple[int, ...] = (1,)  # N, ascending: slots of a draft block
    ingest_tokens: tuple[int, ...] = (1,)
    ingest_ms: tuple[float, ...] = (0.0,)  # by ingest_tokens
    host_ms: tuple[float, ...] = ()  # [R] of a step outside the engines; empty: not measured
    drafting_host_ms: tuple[float, ...] = ()  # [R] what a step that drafts takes there more
    is_padded: bool = False  # calls are padded to the measured request and token counts
    provenance: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        """Raises ValueError for what no measurement gives."""
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"expected step table schema {SCHEMA_VERSION}, found {self.schema_version}")
        for name in ("num_requests", "context_tokens", "extra_tokens", "num_slots", "ingest_tokens"):
            axis = getattr(self, name)
            is_known = bool(axis) or name in ("num_slots", "ingest_tokens")  # nothing of a drafter, where there is none
            if not is_known or list(axis) != sorted(set(axis)) or min(axis, default=0) < 0:
                raise ValueError(f"{name}: expected ascending numbers, found {list(axis)}")
        depths, requests = len(self.context_tokens), len(self.num_requests)
        for name, shape in (
            ("step_ms", (depths, requests, len(self.extra_tokens))),
            ("draft_ms", (depths, requests, len(self.num_slots))),
            ("ingest_ms", (len(self.ingest_tokens),)),
            ("host_ms", (requests if self.host_ms else 0,)),
            ("drafting_host_ms", (requests if self.host_ms else 0,)),
        ):
            values = np.array(getattr(self, name), dtype=np.float64)  # None: nan
            if values.shape != shape:
                raise ValueError(f"{name}: expected {' x '.join(map(str, shape))} numbers, found {values.shape}")
            is_measured = np.array([each is not None for each in _flat(getattr(self, name))], dtype=bool)
            if not (np.isfinite(values.ravel()[is_measured]).all() and (values.ravel()[is_measured] >= 0).all()):
                raise ValueError(f"{name}: expected milliseconds >= 0, found {values.ravel()[is_measured].min()}")
        if any(not row[0] for plane in self.step_ms for row in plane):
            raise ValueError("step_ms: expected the plain step at every depth and request count, above 0")

    @cached_property
    def _dense(self) -> Floats:
        """step_ms at every number of extra tokens, [C, R, last of extra_tokens + 1].

        Deeper contexts add to the first depth what they add at the token counts measured there. Behind the last point
        of a request count, tokens cost what they add for the first one.
        """
        extra = np.arange(self.extra_tokens[-1] + 1.0)
        dense = np.empty((len(self.context_tokens), len(self.num_requests), len(extra)))
        for depth, plane in enumerate(self.step_ms):
            for at, row in enumerate(plane):
                known = [(x, ms) for x, ms in zip(self.extra_tokens, row, strict=True) if ms is not None]
                tokens, values = np.array([x for x, _ in known]), np.array([ms for _, ms in known])
                if depth:
                    added = np.maximum(values - dense[0, at, tokens], 0.0)
                    dense[depth, at] = dense[0, at] + np.interp(extra, tokens, added)
                    continue
                if not self.is_padded:
                    values = values[padded_points(values.tolist())]
                curve = self._stair(extra, tokens, isotonic(values.tolist()))
                if at:
                    behind = extra > tokens[-1]
                    curve[behind] = curve[tokens[-1]] + dense[0, 0, behind] - dense[0, 0, tokens[-1]]
                dense[0, at] = curve
        return dense

    def _stair(self, extra: Floats, tokens: NDArray[np.int64], values: Sequence[float]) -> Floats:
        if not self.is_padded:
            return np.interp(extra, tokens, values)
        at = np.minimum(np.searchsorted(tokens, extra), len(values) - 1)
        return np.asarray(values, dtype=np.float64)[at]

    def step_curve(self, num_requests: int, context_tokens: float, first: int, last: int) -> Floats:
        """Milliseconds of the step with first .. last extra tokens, [last - first + 1].

        context_tokens: mean of the positions that the requests hold. Tokens beyond the table are extrapolated with the
        mean slope of its second half.
        """
        curve = self._curve(num_requests, round(context_tokens / CONTEXT_STEP))
        if last < len(curve):
            return curve[first : last + 1]
        half = len(curve) // 2
        slope = (curve[-1] - curve[half]) / max(len(curve) - 1 - half, 1)
        tokens = np.arange(first, last + 1)
        return np.asarray(curve[np.minimum(tokens, len(curve) - 1)] + np.maximum(tokens - (len(curve) - 1), 0) * slope)

    def padded_tokens(self, num_requests: int, num_tokens: int) -> int:
        """Packed tokens that a call takes least time with, measured for as many requests or the next fewer."""
        at = max(bisect_right(self.num_requests, num_requests) - 1, 0)
        return num_tokens if self.is_padded else self._buckets[at].get(num_tokens, num_tokens)

    @cached_property
    def _buckets(self) -> list[dict[int, int]]:
        """By request count."""
        rows = zip(self.num_requests, self.step_ms[0], strict=True)
        return [token_buckets(count, self.extra_tokens, row) for count, row in rows]

    def draft_cost(self, num_requests: int, num_slots: int, context_tokens: float) -> float:
        """Milliseconds of a block of num_slots for so many requests, nothing ingested; 0 without requests or
        a drafter."""
        if not num_requests or not self.num_slots:
            return 0.0
        return self._draft(num_requests, num_slots, round(context_tokens / CONTEXT_STEP))

    def ingest_cost(self, num_tokens: int) -> float:
        """Milliseconds of bringing the drafter's context forward by so many tokens."""
        if not num_tokens or not self.ingest_tokens:
            return 0.0
        return self._ingest(num_tokens)

    def host_cost(self, num_requests: int, *, is_drafting: bool) -> float:
        """Milliseconds of a step outside the engines."""
        return self._host(num_requests, is_drafting) if self.host_ms else 0.0

    @property
    def is_smooth(self) -> bool:
        """Whether a call has as many tokens as it needs, so that each has a price of its own.

        Measured prices may have stairs all the same, which early stopping does not climb (docs/adr/0003).
        """
        return not self.is_padded

    @lru_cache(maxsize=1024)  # noqa: B019 # one table lives as long as its process
    def _curve(self, num_requests: int, depth: int) -> Floats:
        requests, axis = self._requests(num_requests)
        curve = self._at_depth(self._dense, depth * CONTEXT_STEP)
        blended: Floats = np.sum([share * curve[at] for at, share in requests], axis=0)
        if self.is_padded and (spare := axis - num_requests) > 0:  # padding holds so many tokens already
            blended = np.concatenate((np.full(spare, blended[0]), blended))[: len(blended)]
        return blended

    @lru_cache(maxsize=4096)  # noqa: B019
    def _draft(self, num_requests: int, num_slots: int, depth: int) -> float:
        requests, _ = self._requests(num_requests)
        plane = self._at_depth(np.array(self.draft_ms), depth * CONTEXT_STEP)
        return sum(share * float(np.interp(num_slots, self.num_slots, plane[at])) for at, share in requests)

    @lru_cache(maxsize=4096)  # noqa: B019
    def _ingest(self, num_tokens: int) -> float:
        grid, values = self.ingest_tokens, isotonic(self.ingest_ms)
        if num_tokens > grid[-1]:
            return values[-1] * num_tokens / grid[-1]
        return float(np.interp(num_tokens, grid, values))

    @lru_cache(maxsize=4096)  # noqa: B019
    def _host(self, num_requests: int, is_drafting: bool) -> float:
        plain = float(np.interp(num_requests, self.num_requests, self.host_ms))
        more = float(np.interp(num_requests, self.num_requests, self.drafting_host_ms)) if is_drafting else 0.0
        return plain + more

    def _requests(self, num_requests: int) -> tuple[list[tuple[int, float]], int]:
        """(index, share) of the measured request counts that price `num_requests`, and the count that is computed."""
        counts = self.num_requests
        at = min(bisect_left(counts, num_requests), len(counts) - 1)
        if self.is_padded or at == 0 or counts[at] <= num_requests:
            return [(at, 1.0)], counts[at]
        share = (counts[at] - num_requests) / (counts[at] - counts[at - 1])
        return [(at - 1, share), (at, 1.0 - share)], num_requests

    def _at_depth(self, values: Floats, context_tokens: float) -> Floats:
        """values [C, ...] at a depth between two measured ones; beyond them, along the last line."""
        depths = self.context_tokens
        if len(depths) == 1:
            shallow: Floats = values[0]
            return shallow
        at = min(max(bisect_left(depths, context_tokens), 1), len(depths) - 1)
        share = max((context_tokens - depths[at - 1]) / (depths[at] - depths[at - 1]), 0.0)
        result: Floats = values[at - 1] + share * (values[at] - values[at - 1])
        return result

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def save(self, path: Path) -> None:
        path.write_text(self.as_json())

    @classmethod
    def load(cls, path: Path) -> StepTable:
        """Raises ManifestError when the file is missing, holds what is no measurement or is of another schema."""
        from pydantic import TypeAdapter, ValidationError  # at the boundary only: the runtime needs none of it

        try:
            data = json.loads(path.read_text())
            if not isinstance(data, dict) or (odd := sorted(set(data) - set(cls.__dataclass_fields__))):
                raise ValueError(
                    f"expected a table with known fields, found {abridged(odd if isinstance(data, dict) else data)}"
                )
            if data.get("schema_version") != SCHEMA_VERSION:
                raise ValueError(
                    f"expected step table schema {SCHEMA_VERSION}, found {abridged(data.get('schema_version'))}"
                )
            return TypeAdapter(cls).validate_python(data)
        except FileNotFoundError:
            raise ManifestError(f"no step table at {path}; run `dspark-trt build` again") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = place(first["loc"]) or "table"
            raise ManifestError(f"{path}: {where}: {first['msg']}; run `dspark-trt profile` again") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ManifestError(f"{path} is no step table ({error}); run `dspark-trt profile` again") from None


def _flat(values: Any) -> list[Any]:
    return [leaf for each in values for leaf in _flat(each)] if isinstance(values, tuple | list) else [values]
