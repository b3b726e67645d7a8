"""A calibration as a table, as Markdown and as one self-contained HTML page with a reliability diagram a position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dspark_trt.calibration.file import CalibrationFile
from dspark_trt.calibration.fit import MIN_BLOCKS, MIN_REACHING
from dspark_trt.commands.bench_report import STYLE
from dspark_trt.commands.svg_plot import Line, plot
from dspark_trt.errors import RecipeError
from dspark_trt.files import write_atomically

COLUMNS = (
    "position",
    "blocks to fit",
    "ECE before",
    "ECE after",
    "by temperature",
    "chance",
    "AUC",
    "greedy slope, offset",
    "sampled slope, offset",
)
MIN_SHOWN = 10  # blocks of a bin in a diagram


def facts(found: CalibrationFile) -> list[str]:
    """What the figures are of, and what to know about them."""
    provenance = found.provenance
    if found.kind == "imported":
        lines = [f"imported from {provenance['imported_from']}: nothing was recorded here"]
        return [*lines, "the errors below were measured where the file was made"] if found.before else lines
    if "num_fit_blocks" not in provenance:
        return [f"{found.kind}: written before this version; run `dspark-trt calibrate` for its figures"]
    counts = [
        f"{sum(provenance[key].values())} {what} ({provenance[key]['greedy']} greedy)"
        for key, what in (("num_fit_blocks", "blocks to fit"), ("num_held_out_blocks", "held out"))
    ]
    lines = [f"{', '.join(counts)}, of {provenance['num_prompts']} prompts"]
    if found.kind == "neutral":
        needed = f"at least {MIN_BLOCKS} to fit and {MIN_BLOCKS // 4} held out"
        return [*lines, f"neutral: too few blocks, expected {needed}; raise --seconds or give more --prompts"]
    for regime, count in provenance["num_fit_blocks"].items():
        if count < MIN_BLOCKS:
            other = "sampled" if regime == "greedy" else "greedy"
            lines.append(f"{regime}: {count} blocks are too few, {MIN_BLOCKS} expected; takes the lines of {other}")
            continue
        few = [str(at) for at, each in enumerate(provenance["num_reaching"][regime], 1) if each < MIN_REACHING]
        if few:
            lines.append(
                f"{regime}: position {', '.join(few)} stays neutral: fewer than {MIN_REACHING} blocks reach it"
            )
    return lines


def rows(found: CalibrationFile) -> list[list[str]]:
    """One row of cells a position, as COLUMNS says. Figures that were not measured are empty."""
    reaching = found.provenance.get("num_reaching", {})
    table = []
    for at in range(len(found.temperatures)):
        before, after, temperature = (
            each[at] if each else None for each in (found.before, found.after, found.after_temperatures)
        )
        table.append(
            [
                str(at + 1),
                f"{sum(each[at] for each in reaching.values()):.0f}" if reaching else "",
                _error(before),
                _error(after),
                _error(temperature),
                _percent(after, "ece_noise"),
                f"{after['auc']:.3f}" if after else "",
                *(f"{lines.slopes[at]:.2f}, {lines.offsets[at]:+.2f}" for lines in (found.greedy, found.sampled)),
            ]
        )
    return table


def _error(quality: Mapping[str, Any] | None) -> str:
    if quality is None:
        return ""
    if quality.get("ece_low") is None:
        return _percent(quality, "ece")
    return f"{_percent(quality, 'ece')} [{100 * quality['ece_low']:.1f}, {100 * quality['ece_high']:.1f}]"


def _percent(quality: Mapping[str, Any] | None, name: str) -> str:
    value = None if quality is None else quality.get(name)
    return "" if value is None else f"{value:.1%}"


def as_text(found: CalibrationFile) -> list[str]:
    """Lines for a terminal."""
    table = [list(COLUMNS), *rows(found)]
    widths = [max(len(row[at]) for row in table) for at in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return [*facts(found), "", *lines]


NOTES = (
    "Errors are expected calibration errors (ECE, 20 bins) of the survival up to a position, on held-out prompts; in "
    "brackets the 95 % bootstrap interval over prompts of the error without chance.",
    "Before: confidences as the drafter gives them. After: with slope and offset. By temperature: with the one "
    "temperature a position that other engines read.",
    "Chance: the ECE that predictions without any error show on so many prompts.",
)


def as_markdown(found: CalibrationFile, build: str) -> str:
    lines = [f"# Calibration of {build}", "", *(f"- {each}" for each in (*facts(found), *NOTES)), ""]
    lines += [_cells(COLUMNS), _cells(["---"] * len(COLUMNS)), *map(_cells, rows(found)), ""]
    return "\n".join(lines)


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def as_html(found: CalibrationFile, build: str) -> str:
    title = escape(f"Calibration of {build}")
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(found))
    return "\n".join(
        [
            f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title>",
            f"<style>{STYLE}</style><h1>{title}</h1><ul>",
            *(f"<li>{escape(each)}</li>" for each in (*facts(found), *NOTES)),
            f"</ul><table><tr>{head}</tr>{body}</table>",
            *diagrams(found),
            "</html>",
        ]
    )


def diagrams(found: CalibrationFile) -> list[str]:
    """A reliability diagram of each position, before and after; bins of fewer than MIN_SHOWN blocks are left out."""
    return [
        plot(
            f"Position {at + 1}: survival",
            "predicted",
            "observed",
            [
                Line("no error", [(0.0, 0.0), (1.0, 1.0)]),
                Line("before", _points(found.before[at])),
                Line("after", _points(found.after[at])),
            ],
        )
        for at in range(len(found.before))
    ]


def _points(quality: Mapping[str, Any]) -> list[tuple[float, float]]:
    bins = quality.get("bins", ())
    return [(each["predicted"], each["observed"]) for each in bins if each["num_blocks"] >= MIN_SHOWN]


def check_report_path(path: Path) -> None:
    """Before minutes of recording. Raises RecipeError."""
    if path.suffix not in (".md", ".html"):
        raise RecipeError(f"--report: expected a name that ends in .md or .html, found {path.name}")
    if not path.absolute().parent.is_dir():
        raise RecipeError(f"--report: the folder {path.absolute().parent} does not exist; make it first")


def write_report(path: Path, found: CalibrationFile, build: str) -> None:
    """By the ending of the name: .md or .html."""
    write_atomically(path, as_markdown(found, build) if path.suffix == ".md" else as_html(found, build))
