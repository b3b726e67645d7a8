"""What a report of a bench run has: notes, tables and plots, whatever the form that it is written in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark_trt.commands.bench_statistics import Interval, Summary, WindowSummary, best_at_speed
from dspark_trt.commands.svg_plot import Line, plot

COLUMNS = (
    "mode",
    "tokens/s",
    "ratio to off",
    "tokens/s of a user",
    "first token ms",
    "verify_len",
    "accepted_len",
    "steps / requests not drafting",
    "requests copying drafts",
    "price error: median / p90",
    "with prompts",
)
Errors = tuple[float, float] | None  # median and p90


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    summaries: Sequence[Summary]
    facts: dict[str, Any]
    price_errors: dict[str, tuple[Errors, Errors]] = field(default_factory=dict)  # by mode; see `errors_by_mode`
    min_user_speed: float | None = None  # tokens/s
    windows: Sequence[WindowSummary] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A table under its heading."""

    heading: str
    columns: Sequence[str]
    rows: list[list[str]]


def notes(report: Report) -> list[str]:
    """How the figures are to be read."""
    facts = report.facts
    coverage = min((summary.tokens_per_s.coverage for summary in report.summaries), default=0.0)
    return [
        f"{facts['repeats']} interleaved repeats: each has every mode under every load, in rotated order. Medians, in "
        f"brackets an interval that holds the median with {coverage:.0%} (order statistics; 5 repeats reach 90 %).",
        "The ratio to off is taken within each repeat, then summarised.",
        "Closed loop: as many requests in flight as the table says, all the time; greedy.",
        "Price error: expected against measured time of a step, relative; steps that read prompts stand apart.",
        f"Machine: {facts['machine']}. Build: {facts['build']}.",
        *facts.get("remarks", ()),
    ]


def sections(report: Report) -> Iterator[Section]:
    """Each load, then what is told over all of them."""
    loads: dict[str, list[list[str]]] = {}
    for summary in report.summaries:
        loads.setdefault(f"{summary.kind} prompts, {summary.concurrency} in flight", []).append(_row(summary))
    for heading, rows in loads.items():
        yield Section(heading, COLUMNS, rows)
    yield from _trace(report.windows)
    if report.min_user_speed is not None:
        yield _at_speed(report.summaries, report.min_user_speed)
    if report.price_errors:
        yield Section(
            "Predicted against served step time, all loads",
            ("mode", "median error", "p90", "with prompts: median", "p90"),
            [
                [
                    mode,
                    *(f"{value:.1%}" if value is not None else "" for pair in pairs for value in pair or (None, None)),
                ]
                for mode, pairs in report.price_errors.items()
            ],
        )


def _row(summary: Summary) -> list[str]:
    skipped = "" if summary.steps_not_drafting is None else f"{summary.steps_not_drafting:.0%}"
    if summary.requests_not_drafting is not None:
        skipped += f" / {summary.requests_not_drafting:.0%}"
    return [
        summary.mode,
        _interval(summary.tokens_per_s, ".1f"),
        _interval(summary.ratio_to_off, ".3f"),
        _number(summary.user_tokens_per_s, ".1f"),
        _number(summary.ttft_ms, ".0f"),
        _number(summary.mean_verify_len, ".2f"),
        _number(summary.accepted_len, ".2f"),
        skipped,
        _number(summary.requests_looking_up, ".0%"),
        _errors(summary.price_error),
        _errors(summary.prefill_price_error),
    ]


def _at_speed(summaries: Sequence[Summary], floor: float) -> Section:
    rows = [
        [
            f"{each.kind}: {each.mode}",
            str(each.concurrency),
            _interval(each.tokens_per_s, ".1f"),
            _number(each.user_tokens_per_s, ".1f"),
            _interval(each.ratio_to_off, ".3f"),
        ]
        for each in best_at_speed(summaries, floor)
    ]
    columns = ("best load that keeps it", "in flight", "tokens/s", "tokens/s of a user", "ratio to off at this load")
    return Section(f"At least {floor:g} tokens/s for a user", columns, rows or [["none", "", "", "", ""]])


def _trace(windows: Sequence[WindowSummary]) -> Iterator[Section]:
    for concurrency in dict.fromkeys(each.concurrency for each in windows):
        yield Section(
            f"The turn, {concurrency} in flight: parts of the run by tokens",
            ("mode, part", "tokens/s", "ratio to off", "verify_len", "steps drafting"),
            [
                [
                    f"{each.mode}, {each.window}",
                    f"{each.tokens_per_s:.1f}",
                    _number(each.ratio_to_off, ".3f"),
                    f"{each.mean_verify_len:.2f}",
                    f"{each.steps_drafting:.0%}",
                ]
                for each in windows
                if each.concurrency == concurrency
            ],
        )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _errors(pair: Errors) -> str:
    return "" if pair is None else f"{pair[0]:.1%} / {pair[1]:.1%}"


def _interval(interval: Interval | None, form: str) -> str:
    if interval is None:
        return ""
    return f"{interval.median:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def plots(report: Report) -> list[str]:
    """Throughput and verify_len against load, throughput against the speed of a user, of the first kind of prompts;
    what a turning run does at its first load."""
    summaries = report.summaries
    kind = summaries[0].kind if summaries else ""
    by_mode: dict[str, list[Summary]] = {}
    for summary in sorted(summaries, key=lambda each: each.concurrency):
        if summary.kind == kind:
            by_mode.setdefault(summary.mode, []).append(summary)

    def lines(x: str, y: str) -> list[Line]:
        found = []
        for mode, of_mode in by_mode.items():
            places = [(_value(each, x), _value(each, y)) for each in of_mode]
            found.append(Line(mode, [(a, b) for a, b in places if a is not None and b is not None]))
        return [line for line in found if line.points]

    return [
        plot(f"Throughput, {kind} prompts", "requests in flight", "tokens/s", lines("concurrency", "tokens_per_s")),
        plot(
            "Throughput against the speed of a user",
            "tokens/s of one user",
            "tokens/s of all",
            lines("user_tokens_per_s", "tokens_per_s"),
        ),
        plot("Drafts verified", "requests in flight", "mean verify_len", lines("concurrency", "mean_verify_len")),
        plot("First token", "requests in flight", "ms", lines("concurrency", "ttft_ms")),
        *_trace_plots(report.windows),
    ]


def _trace_plots(windows: Sequence[WindowSummary]) -> Iterator[str]:
    by_mode: dict[str, list[WindowSummary]] = {}
    for each in windows:
        if each.concurrency == windows[0].concurrency:
            by_mode.setdefault(each.mode, []).append(each)
    for name, label in (
        ("ratio_to_off", "throughput, ratio to off"),
        ("mean_verify_len", "mean verify_len"),
        ("steps_drafting", "share of steps drafting"),
    ):
        lines = [
            Line(mode, [(each.window, value) for each in of_mode if (value := getattr(each, name)) is not None])
            for mode, of_mode in by_mode.items()
        ]
        if any(line.points for line in lines):
            yield plot(f"The turn, {windows[0].concurrency} in flight", "part of the run", label, lines)


def _value(summary: Summary, name: str) -> float | None:
    value = getattr(summary, name)
    return value.median if isinstance(value, Interval) else value
