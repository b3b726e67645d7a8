"""The report of a bench run: Markdown, one self-contained HTML page, or the data as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from dspark_trt.commands.bench_statistics import Interval, Summary
from dspark_trt.commands.svg_plot import Line, plot
from dspark_trt.errors import RecipeError
from dspark_trt.files import write_atomically

COLUMNS = (
    "mode",
    "tokens/s",
    "ratio to off",
    "tokens/s of a user",
    "first token ms",
    "verify_len",
    "accepted_len",
    "steps / requests not drafting",
    "price error: median / p90",
    "with prompts",
)
STYLE = (
    "body{font-family:sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #ccc;padding:.25em .6em;text-align:right}"
    "td:first-child{text-align:left}svg{margin:.5em}"
)


def notes(summaries: Sequence[Summary], facts: dict[str, Any]) -> list[str]:
    """How the figures are to be read."""
    intervals = [summary.tokens_per_s for summary in summaries]
    coverage = min((interval.coverage for interval in intervals), default=0.0)
    return [
        f"{facts['repeats']} interleaved repeats: each has every mode under every load, in rotated order. Medians, in "
        f"brackets an interval that holds the median with {coverage:.0%} (order statistics; 5 repeats reach 90 %).",
        "The ratio to off is taken within each repeat, then summarised.",
        "Closed loop: as many requests in flight as the table says, all the time; greedy.",
        "Price error: expected against measured time of a step, relative; steps that read prompts stand apart.",
        f"Machine: {facts['machine']}. Build: {facts['build']}.",
        *facts.get("remarks", ()),
    ]


def tables(summaries: Sequence[Summary]) -> list[tuple[str, list[list[str]]]]:
    """A heading and the rows of each load."""
    loads: dict[str, list[list[str]]] = {}
    for summary in summaries:
        loads.setdefault(f"{summary.kind} prompts, {summary.concurrency} in flight", []).append(_row(summary))
    return list(loads.items())


def _row(summary: Summary) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def errors(pair: tuple[float, float] | None) -> str:
        return "" if pair is None else f"{pair[0]:.1%} / {pair[1]:.1%}"

    skipped = "" if summary.steps_not_drafting is None else f"{summary.steps_not_drafting:.0%}"
    if summary.requests_not_drafting is not None:
        skipped += f" / {summary.requests_not_drafting:.0%}"
    return [
        summary.mode,
        _interval(summary.tokens_per_s, ".1f"),
        _interval(summary.ratio_to_off, ".3f"),
        number(summary.user_tokens_per_s, ".1f"),
        number(summary.ttft_ms, ".0f"),
        number(summary.mean_verify_len, ".2f"),
        number(summary.accepted_len, ".2f"),
        skipped,
        errors(summary.price_error),
        errors(summary.prefill_price_error),
    ]


def _interval(interval: Interval | None, form: str) -> str:
    if interval is None:
        return ""
    return f"{interval.median:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def as_markdown(summaries: Sequence[Summary], facts: dict[str, Any]) -> str:
    lines = ["# dspark-trt bench", "", *(f"- {note}" for note in notes(summaries, facts)), ""]
    for heading, rows in tables(summaries):
        lines += [f"## {heading}", "", _cells(COLUMNS), _cells(["---"] * len(COLUMNS)), *map(_cells, rows), ""]
    return "\n".join(lines)


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def as_html(summaries: Sequence[Summary], facts: dict[str, Any]) -> str:
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>dspark-trt bench</title>",
        f"<style>{STYLE}</style><h1>dspark-trt bench</h1><ul>",
        *(f"<li>{escape(note)}</li>" for note in notes(summaries, facts)),
        "</ul>",
        *plots(summaries),
    ]
    for heading, rows in tables(summaries):
        head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts.append(f"<h2>{escape(heading)}</h2><table><tr>{head}</tr>{body}</table>")
    return "\n".join([*parts, "</html>"])


def plots(summaries: Sequence[Summary]) -> list[str]:
    """Throughput and verify_len against load, throughput against the speed of a user; of the first kind of prompts."""
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
    ]


def _value(summary: Summary, name: str) -> float | None:
    value = getattr(summary, name)
    return value.median if isinstance(value, Interval) else value


def as_data(summaries: Sequence[Summary], facts: dict[str, Any]) -> dict[str, Any]:
    return {**facts, "summaries": [asdict(summary) for summary in summaries]}


def check_report_path(path: Path) -> None:
    """Before an hour of measuring. Raises RecipeError."""
    if path.suffix not in (".md", ".html", ".json"):
        raise RecipeError(f"--output: expected a name that ends in .md, .html or .json, found {path.name}")
    if not path.absolute().parent.is_dir():
        raise RecipeError(f"--output: the folder {path.absolute().parent} does not exist; make it first")


def write_report(path: Path, summaries: Sequence[Summary], facts: dict[str, Any]) -> None:
    """By the ending of the name: .md, .html or .json."""
    text = {
        ".md": lambda: as_markdown(summaries, facts),
        ".html": lambda: as_html(summaries, facts),
        ".json": lambda: json.dumps(as_data(summaries, facts), indent=1) + "\n",
    }[path.suffix]()
    write_atomically(path, text)
