"""`dspark-trt export`: what a build measured, for another engine that serves the same pair."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dspark_trt.commands.options import AsJson, BuildFolder, command, from_home
from dspark_trt.errors import RecipeError

if TYPE_CHECKING:
    from dspark_trt.building.recipe import BuildRecipe
    from dspark_trt.calibration.file import CalibrationFile
    from dspark_trt.steptable.additive import AdditiveFit

CONTEXT_TOKENS = 256


@command()
def export(
    folder: BuildFolder,
    engine: Annotated[Literal["tensorrt-llm", "sglang"], typer.Option("--for", help="Engine that reads the files.")],
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="New folder, or one of an earlier export.", parser=from_home)
    ],
    context_tokens: Annotated[
        int, typer.Option(metavar="N", help="Positions that a request holds: their tables have no such axis.")
    ] = CONTEXT_TOKENS,
    as_json: AsJson = False,
) -> None:
    """Write temperatures, prices and the start of a server in another engine's forms; say how well prices fit."""
    if context_tokens < 1:
        raise RecipeError(f"--context-tokens: expected at least 1, found {context_tokens}")
    from dspark_trt.building.finished import read_finished
    from dspark_trt.calibration.file import CALIBRATION_FILE, load_calibration
    from dspark_trt.checkpoints.spec_json import read_draft_source
    from dspark_trt.commands import report
    from dspark_trt.commands.exported_files import FORMS, Exported
    from dspark_trt.steptable.additive import fit_additive
    from dspark_trt.steptable.table import StepTable

    recipe = read_finished(folder)[0].recipe
    if not recipe.has_drafter_model:
        raise RecipeError(
            f"{folder} was built with drafter {recipe.drafter}, and {engine} asks for a DSpark checkpoint; export a "
            "build that has one"
        )
    gamma = read_draft_source(folder).gamma
    found = load_calibration(folder / "calibration" / CALIBRATION_FILE, gamma=gamma)
    fit = fit_additive(
        StepTable.load(folder / "steptable" / "step_table.json"),
        gamma=gamma,
        context_tokens=context_tokens,
        ingested_tokens=1.0 + float(found.calibration.expected_survival.sum()),
    )
    exported = Exported(
        target=_place(recipe.target),
        drafter=_place(recipe.drafter),
        gamma=gamma,
        folder=output.absolute(),
        calibration=found,
        cost=fit.cost,
        context_tokens=context_tokens,
    )
    files = FORMS[engine](exported)
    _write(output, files)
    if as_json:
        report.print_json({"files": [str(output / name) for name in files], "fit": _figures(fit)})
        return
    for name in files:
        report.print_line(str(output / name))
    report.print_line(
        f"prices: T = bias + alpha(requests) + theta(tokens) is within {fit.max_error:.1%} of the step table, median "
        f"{fit.median_error:.1%}, over {fit.num_cells} steps (largest at {fit.worst[0]} requests, {fit.worst[1]} "
        f"tokens), at {context_tokens} positions"
    )
    for note in _notes(engine, recipe, found, fit):
        report.print_note(note)


def _figures(fit: AdditiveFit) -> dict[str, Any]:
    return {
        "num_cells": fit.num_cells,
        "median_error": fit.median_error,
        "max_error": fit.max_error,
        "worst": {"num_requests": fit.worst[0], "batch_tokens": fit.worst[1]},
        "is_flat": fit.is_flat,
    }


def _notes(engine: str, recipe: BuildRecipe, found: CalibrationFile, fit: AdditiveFit) -> list[str]:
    """What to know before these files are used."""
    notes = [
        "prices are those of this build's engines on this machine; on another one, that engine's own profiler wins"
    ]
    if found.kind == "neutral":
        notes.append("temperatures are all 1: this build is not calibrated; run `dspark-trt calibrate` first")
    elif found.kind == "fitted":
        notes.append("temperatures lack the offsets and the regimes of this build's calibration: see `ece_after`")
    if fit.is_flat:
        notes.append("prices hardly rise with tokens: every draft will be verified")
    if recipe.target.lower().endswith(".gguf"):
        notes.append("put the Hugging Face checkpoint that the GGUF target was made from into serve.sh")
    if engine == "tensorrt-llm":
        notes.append(
            "expected: TensorRT-LLM 1.4.0rc4 or later, whose loader of the cost table has been seen on branches only"
        )
    return notes


def _place(source: str) -> str:
    """A path as any folder sees it; a hub id as it is."""
    path = Path(source).expanduser()
    return str(path.absolute()) if path.exists() else source


def _write(output: Path, files: dict[str, str]) -> None:
    """All of them or none. Raises RecipeError when the folder holds something else."""
    from dspark_trt.commands.exported_files import CONFIG, COST_TABLE, START, TEMPERATURES
    from dspark_trt.files import replace_folder

    if output.exists() and not output.is_dir():
        raise RecipeError(f"--output {output} is a file; give a folder")
    known = {CONFIG, COST_TABLE, START, TEMPERATURES}
    if output.exists() and (strangers := sorted(path.name for path in output.iterdir() if path.name not in known)):
        raise RecipeError(f"--output {output} holds {strangers[:3]}, which no export wrote; give a new folder")
    with replace_folder(output) as scratch:
        for name, text in files.items():
            (scratch / name).write_text(text)
        (scratch / START).chmod(0o755)
