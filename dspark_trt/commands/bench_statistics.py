"""Medians, intervals and ratios of interleaved repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark_trt.commands.bench_load import Measured

CONFIDENCE = 0.9


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and an interval around it that holds without any assumption about the noise."""

    median: float
    low: float
    high: float
    coverage: float  # probability that the interval holds the true median; few repeats do not reach 90 %


def median_interval(values: Sequence[float]) -> Interval:
    """The narrowest pair of order statistics that holds the median with 90 %, else the whole range."""
    ordered, count = sorted(values), len(values)
    best = 0
    for cut in range(1, (count + 1) // 2):
        if _coverage(count, cut) >= CONFIDENCE:
            best = cut
    return Interval(statistics.median(ordered), ordered[best], ordered[count - 1 - best], _coverage(count, best))


def _coverage(count: int, cut: int) -> float:
    """P(the median lies between the order statistics cut + 1 and count - cut)."""
    outside: int = sum(math.comb(count, at) for at in range(cut + 1))
    return max(0.0, 1 - 2 * outside / 2.0**count)


@dataclass(frozen=True, slots=True)
class Summary:
    """One mode under one load, over all repeats."""

    mode: str
    kind: str
    concurrency: int
    tokens_per_s: Interval
    ratio_to_off: Interval | None  # of the same repeat; None where "off" was not measured
    user_tokens_per_s: float | None
    ttft_ms: float | None
    mean_verify_len: float | None
    accepted_len: float | None
    steps_not_drafting: float | None
    requests_not_drafting: float | None
    price_error: tuple[float, float] | None  # median and p90, relative; steps that read no prompt
    prefill_price_error: tuple[float, float] | None


def summarize(results: Sequence[Measured], modes: Sequence[str]) -> list[Summary]:
    """Loads in the order of their measurement, in each of them modes in the order of `modes`."""
    cells: dict[tuple[str, int, str], list[Measured]] = {}
    for result in results:
        cells.setdefault((result.kind, result.concurrency, result.mode), []).append(result)
    loads = dict.fromkeys((kind, concurrency) for kind, concurrency, _ in cells)
    return [
        _summary(cell, cells.get((*load, "off")))
        for load in loads
        for mode in modes
        if (cell := cells.get((*load, mode))) is not None
    ]


def _summary(cell: list[Measured], off: list[Measured] | None) -> Summary:
    plain = {result.repeat: result.tokens_per_s for result in off or ()}
    ratios = [result.tokens_per_s / plain[result.repeat] for result in cell if result.repeat in plain]
    first = cell[0]
    return Summary(
        mode=first.mode,
        kind=first.kind,
        concurrency=first.concurrency,
        tokens_per_s=median_interval([result.tokens_per_s for result in cell]),
        ratio_to_off=median_interval(ratios) if ratios else None,
        price_error=_quantiles([error for result in cell for error in result.price_errors]),
        prefill_price_error=_quantiles([error for result in cell for error in result.prefill_price_errors]),
        **{
            name: _median(cell, name)
            for name in (
                "user_tokens_per_s",
                "ttft_ms",
                "mean_verify_len",
                "accepted_len",
                "steps_not_drafting",
                "requests_not_drafting",
            )
        },
    )


def _median(cell: list[Measured], name: str) -> float | None:
    known: list[Any] = [value for result in cell if (value := getattr(result, name)) is not None]
    return float(statistics.median(known)) if known else None


def _quantiles(errors: list[float]) -> tuple[float, float] | None:
    return (float(np.median(errors)), float(np.quantile(errors, 0.9))) if errors else None
