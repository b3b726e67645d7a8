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
LOOKUP_COLUMNS = ("match length", "greedy lookups", "accepted", "sampled lookups", "accepted")
MIN_SHOWN = 10  # blocks of a bin in a diagram


def facts(found: CalibrationFile) -> list[str]:
    """What the figures are of, and what to know about them."""
    provenance = found.provenance
    if found.kind == "imported":
        lines = [f"imported from {provenance['imported_from']}: nothing was recorded here"]
        return [*lines, "the errors below were measured where the file was made"] if found.before else lines
    if _is_of_lookups(found):
        seen = " and ".join(f"{sum(each)} {name}" for name, each in provenance["num_lookups"].items())
        return [
            f"no model drafts: {seen} lookups in the answers to {provenance['num_prompts']} prompts; there are no "
            "confidences that could be calibrated"
        ]
    if "num_fit_blocks" not in provenance:
        return [f"{found.kind}: written before this version; run `dspark-trt calibrate` for its figures"]
    counts = [
        f"{sum(provenance[f'num_{part}_blocks'].values())} blocks {what} "
        f"({provenance[f'num_{part}_blocks']['greedy']} greedy) of {provenance[f'num_{part}_prompts']} prompts"
        for part, what in (("fit", "to fit"), ("held_out", "held out"))
    ]
    lines = [", ".join(counts)]
    unseen = provenance["num_prompts"] - provenance["num_fit_prompts"] - provenance["num_held_out_prompts"]
    if unseen:
        lines.append(
            f"{unseen} of {provenance['num_prompts']} prompts gave none: out of time (raise --seconds), or too long"
        )
    if found.kind == "neutral":
        needed = f"at least {MIN_BLOCKS} to fit and {MIN_BLOCKS // 4} held out"
        return [*lines, f"neutral: too few blocks, expected {needed}; raise --seconds or give more --prompts"]
    for regime, count in provenance["num_fit_blocks"].items():
        if count < MIN_BLOCKS:
            lines.append(f"{regime}: {count} blocks are too few, {MIN_BLOCKS} expected; takes the lines of all blocks")
            continue
        few = [str(at) for at, each in enumerate(provenance["num_reaching"][regime], 1) if each < MIN_REACHING]
        if few:
            lines.append(
                f"{regime}: neutral at position {', '.join(few)}, which fewer than {MIN_REACHING} blocks reach"
            )
    return lines


def _is_of_lookups(found: CalibrationFile) -> bool:
    """Whether no model drafts where this was measured."""
    return "lookup" in (found.kind, found.provenance.get("kind"))


def columns(found: CalibrationFile) -> tuple[str, ...]:
    return LOOKUP_COLUMNS if _is_of_lookups(found) else COLUMNS


def _notes(found: CalibrationFile) -> tuple[str, ...]:
    return LOOKUP_NOTES if _is_of_lookups(found) else NOTES


def _lookup_rows(found: CalibrationFile) -> list[list[str]]:
    """One row of cells a match length, as LOOKUP_COLUMNS says."""
    assert found.lookup is not None, "it is what was measured"
    counts = found.provenance.get("num_lookups", {})
    table = []
    for at, accepted in enumerate(zip(found.lookup.greedy, found.lookup.sampled, strict=True)):
        cells = [str(at + 1) + (" or more" if at + 1 == len(found.lookup.greedy) else "")]
        for regime, share in zip(("greedy", "sampled"), accepted, strict=True):
            cells += [str(counts[regime][at]) if counts else "", f"{share:.1%}"]
        table.append(cells)
    return table


def rows(found: CalibrationFile) -> list[list[str]]:
    """One row of cells a position (a match length, where drafts are copied), as `columns` says. Figures that were not
    measured are empty."""
    if _is_of_lookups(found):
        return _lookup_rows(found)
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
    table = [list(columns(found)), *rows(found)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return [*facts(found), "", *lines]


NOTES = (
    "Errors are expected calibration errors (ECE, 20 bins) of the survival up to a position, on held-out prompts; in "
    "brackets the 95 % bootstrap interval over prompts of the error without chance.",
    "Before: confidences as the drafter gives them. After: with slope and offset. By temperature: with the one "
    "temperature a position that other engines read.",
    "Chance: the ECE that predictions without any error show on so many prompts.",
)

LOOKUP_NOTES = (
    "Accepted: the share of first drafts that the answer went on with, behind a match of so many tokens of the text; "
    "near the guess of the package where few lookups were seen.",
)


def as_markdown(found: CalibrationFile, build: str) -> str:
    lines = [f"# Calibration of {build}", "", *(f"- {each}" for each in (*facts(found), *_notes(found))), ""]
    lines += [_cells(columns(found)), _cells(["---"] * len(columns(found))), *map(_cells, rows(found)), ""]
    return "\n".join(lines)


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def as_html(found: CalibrationFile, build: str) -> str:
    title = escape(f"Calibration of {build}")
    head = "".join(f"<th>{escape(column)}</th>" for column in columns(found))
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(found))
    return "\n".join(
        [
            f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title>",
            f"<style>{STYLE}</style><h1>{title}</h1><ul>",
            *(f"<li>{escape(each)}</li>" for each in (*facts(found), *_notes(found))),
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
