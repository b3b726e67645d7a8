"""The report of a bench run: Markdown, one self-contained HTML page, or the data as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from dspark_trt.commands.bench_sections import Report, notes, plots, sections
from dspark_trt.commands.bench_statistics import best_at_speed
from dspark_trt.errors import RecipeError
from dspark_trt.files import write_atomically

STYLE = (
    "body{font-family:sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #ccc;padding:.25em .6em;text-align:right}"
    "td:first-child{text-align:left}svg{margin:.5em}"
)


def as_markdown(report: Report) -> str:
    lines = ["# dspark-trt bench", "", *(f"- {note}" for note in notes(report)), ""]
    for section in sections(report):
        head = [_cells(section.columns), _cells(["---"] * len(section.columns))]
        lines += [f"## {section.heading}", "", *head, *map(_cells, section.rows), ""]
    return "\n".join(lines)


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def as_html(report: Report) -> str:
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>dspark-trt bench</title>",
        f"<style>{STYLE}</style><h1>dspark-trt bench</h1><ul>",
        *(f"<li>{escape(note)}</li>" for note in notes(report)),
        "</ul>",
        *plots(report),
    ]
    for section in sections(report):
        head = "".join(f"<th>{escape(column)}</th>" for column in section.columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in section.rows)
        parts.append(f"<h2>{escape(section.heading)}</h2><table><tr>{head}</tr>{body}</table>")
    return "\n".join([*parts, "</html>"])


def as_data(report: Report) -> dict[str, Any]:
    """JSON-ready."""
    data = {
        **report.facts,
        "summaries": [asdict(summary) for summary in report.summaries],
        "price_errors": {
            mode: {"plain": plain, "with_prompts": with_prompts}
            for mode, (plain, with_prompts) in report.price_errors.items()
        },
    }
    if report.windows:
        data["windows"] = [asdict(window) for window in report.windows]
    if report.min_user_speed is not None:
        best = best_at_speed(report.summaries, report.min_user_speed)
        data["at_user_speed"] = {"tokens_per_s": report.min_user_speed, "best": [asdict(summary) for summary in best]}
    return data


def check_report_path(path: Path) -> None:
    """Before an hour of measuring. Raises RecipeError."""
    if path.suffix not in (".md", ".html", ".json"):
        raise RecipeError(f"--output: expected a name that ends in .md, .html or .json, found {path.name}")
    if not path.absolute().parent.is_dir():
        raise RecipeError(f"--output: the folder {path.absolute().parent} does not exist; make it first")


def write_report(path: Path, report: Report) -> None:
    """By the ending of the name: .md, .html or .json."""
    text = {
        ".md": lambda: as_markdown(report),
        ".html": lambda: as_html(report),
        ".json": lambda: json.dumps(as_data(report), indent=1) + "\n",
    }[path.suffix]()
    write_atomically(path, text)
