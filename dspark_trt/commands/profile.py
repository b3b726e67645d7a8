"""`dspark-trt profile`: measure the step table of a build again, alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from dspark_trt.commands.options import AsJson, BuildFolder, command, from_home


@command()
def profile(
    folder: BuildFolder,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the table there; the build stays as it is.", parser=from_home),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=1, metavar="SECONDS", help="Leave out rounds, then sizes, to keep to it; with --output."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the step table again: on another machine, after an update, or when this one was busy."""
    from dspark_trt.building.reprofile import measure_beside, reprofile
    from dspark_trt.commands import report
    from dspark_trt.errors import RecipeError
    from dspark_trt.files import write_atomically

    if output is None and budget is not None:
        raise RecipeError("--budget goes with --output: the table of a build is measured in full")
    with report.Bars() as bars:
        if output is None:
            table = reprofile(folder, progress=lambda done: bars.update("profile", done))
        else:
            table = measure_beside(folder, budget or math.inf, lambda done: bars.update("profile", done))
            write_atomically(output, table.as_json())
    if as_json:
        report.print_json({"provenance": table.provenance})
        return
    report.print_line(f"{output or folder}: step table measured")
    for doubt in table.provenance["doubts"]:
        report.print_note(f"doubtful: {doubt}; measure again when the machine is quiet")
