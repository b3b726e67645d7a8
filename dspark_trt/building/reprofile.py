"""The step table of a finished build, measured again, and whether it needs to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark_trt.building.context import Context
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.building.renew import renew
from dspark_trt.building.stages import STAGES, measured_with
from dspark_trt.log import Progress, get_logger
from dspark_trt.steptable.table import StepTable

STAGE = "steptable"

logger = get_logger(__name__)


def reprofile(folder: Path, progress: Progress = lambda fraction: None) -> StepTable:
    """Measure with today's code on today's machine; the old table is replaced when the new one is there.

    Raises ManifestError when the build is unfinished, edited or in use, EnvironmentMissingError when its engines are
    for another machine.
    """
    (stage,) = (each for each in STAGES if each.name == STAGE)
    renew(folder, stage, progress)
    return StepTable.load(folder / STAGE / "step_table.json")


def warn_of_differences(folder: Path, table: StepTable, recipe: BuildRecipe) -> None:
    """Log what `differences` finds, and the command that mends it."""
    if odd := differences(table, recipe, folder):
        logger.warning(
            "the step table was not measured here as things are now (%s): drafts may be chosen badly; run "
            "`dspark-trt profile %s`",
            "; ".join(odd),
            folder,
        )


def differences(table: StepTable, recipe: BuildRecipe, folder: Path) -> list[str]:
    """What was different where the table was measured: machine, threads, versions of the engine's packages."""
    here = measured_with(Context(recipe, folder))
    return [
        f"{name}: measured with {table.provenance.get(name)}, here {value}"
        for name, value in here.items()
        if _differ(table.provenance.get(name), value)
    ]


def _differ(measured: Any, here: Any) -> bool:
    """Whether both are known and differ; of two dictionaries, what both have."""
    if isinstance(measured, dict) and isinstance(here, dict):
        return any(measured[name] != here[name] for name in measured.keys() & here.keys())
    return measured is not None and measured != here
