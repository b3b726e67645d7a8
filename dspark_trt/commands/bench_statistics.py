"""Medians, intervals and ratios of interleaved repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark_trt.commands.bench_load import Measured, Part

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
    requests_looking_up: float | None
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


def errors_by_mode(
    results: Sequence[Measured], modes: Sequence[str]
) -> dict[str, tuple[tuple[float, float] | None, tuple[float, float] | None]]:
    """Median and p90 of |predicted / served step time - 1| over all loads and repeats, by mode: of steps that read no
    prompt, and of those that do."""
    found = {}
    for mode in modes:
        of_mode = [result for result in results if result.mode == mode]
        plain = _quantiles([error for result in of_mode for error in result.price_errors])
        with_prompts = _quantiles([error for result in of_mode for error in result.prefill_price_errors])
        if plain or with_prompts:
            found[mode] = (plain, with_prompts)
    return found


def best_at_speed(summaries: Sequence[Summary], tokens_per_s: float) -> list[Summary]:
    """Of each kind of prompts and each mode the load of most throughput that gives a user so many tokens/s; of each
    kind the best first. A mode that no load keeps is left out."""
    best: dict[tuple[str, str], Summary] = {}
    for each in summaries:
        if each.user_tokens_per_s is None or each.user_tokens_per_s < tokens_per_s:
            continue
        known = best.get((each.kind, each.mode))
        if known is None or each.tokens_per_s.median > known.tokens_per_s.median:
            best[each.kind, each.mode] = each
    kinds = list(dict.fromkeys(each.kind for each in summaries))
    return sorted(best.values(), key=lambda each: (kinds.index(each.kind), -each.tokens_per_s.median))


@dataclass(frozen=True, slots=True)
class WindowSummary:
    """One part of a turning run in one mode, over all repeats."""

    mode: str
    concurrency: int
    window: int  # from 1
    tokens_per_s: float
    ratio_to_off: float | None  # of the same repeat and part
    mean_verify_len: float
    steps_drafting: float


def summarize_windows(results: Sequence[Measured], modes: Sequence[str]) -> list[WindowSummary]:
    """By concurrency, mode and part; empty without a turning run."""
    off = {(each.concurrency, each.repeat): each.parts for each in results if each.mode == "off"}
    cells: dict[tuple[int, int, int], list[tuple[Part, float | None]]] = {}
    for result in results:
        plain = off.get((result.concurrency, result.repeat))
        for at, part in enumerate(result.parts):
            ratio = part.tokens_per_s / plain[at].tokens_per_s if plain and plain[at].tokens_per_s else None
            cells.setdefault((result.concurrency, modes.index(result.mode), at), []).append((part, ratio))
    found = []
    for (concurrency, mode, at), parts in sorted(cells.items()):
        ratios = [ratio for _, ratio in parts if ratio is not None]
        found.append(
            WindowSummary(
                modes[mode],
                concurrency,
                at + 1,
                statistics.median(part.tokens_per_s for part, _ in parts),
                statistics.median(ratios) if ratios else None,
                statistics.median(part.mean_verify_len for part, _ in parts),
                statistics.median(part.steps_drafting for part, _ in parts),
            )
        )
    return found


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
                "requests_looking_up",
            )
        },
    )


def _median(cell: list[Measured], name: str) -> float | None:
    known: list[Any] = [value for result in cell if (value := getattr(result, name)) is not None]
    return float(statistics.median(known)) if known else None


def _quantiles(errors: list[float]) -> tuple[float, float] | None:
    return (float(np.median(errors)), float(np.quantile(errors, 0.9))) if errors else None
