"""The step table of a finished build: whether it was measured here as things are now, and measuring it again.

A build is only written to by `reprofile`. Tables that were measured beside it are kept in the user's cache folder, by
what they depend on, and are taken where the build's own is of other circumstances.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

from dspark_trt.building.build import stage_settings
from dspark_trt.building.context import Context
from dspark_trt.building.finished import read_finished
from dspark_trt.building.manifest import BuildSummary, hash_key
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.building.renew import check_measurable, renew
from dspark_trt.building.stages import STAGES, Stage, measure_step_table, measured_with
from dspark_trt.errors import ManifestError
from dspark_trt.files import default_cache_folder, write_atomically
from dspark_trt.log import Progress, get_logger
from dspark_trt.steptable.table import StepTable

STAGE, TABLE_FILE = "steptable", "step_table.json"

logger = get_logger(__name__)


def reprofile(folder: Path, progress: Progress = lambda fraction: None) -> StepTable:
    """Measure with today's code on today's machine; the old table is replaced when the new one is there.

    Raises ManifestError when the build is unfinished, edited or in use, EnvironmentMissingError when its engines are
    for another machine.
    """
    renew(folder, _stage(), progress)
    return own_table(folder)


def measure_beside(folder: Path, budget_s: float = math.inf, progress: Progress = lambda fraction: None) -> StepTable:
    """A table of today's machine for a build that stays as it is; `budget_s` as in `profile`.

    Raises as `reprofile`, but for a build that is in use.
    """
    summary, stages = read_finished(folder)
    check_measurable(folder, stages)
    return measure_step_table(Context(summary.recipe, folder), progress, budget_s)


def own_table(folder: Path) -> StepTable:
    """The build's own. Raises ManifestError."""
    return StepTable.load(folder / STAGE / TABLE_FILE)


def table_for_here(folder: Path, summary: BuildSummary) -> StepTable:
    """The build's own table where it was measured as things are now, else one that was measured beside the build.

    Without either, the build's own, and a warning with the command that mends it. Raises ManifestError.
    """
    table = own_table(folder)
    odd = differences(table, summary.recipe, folder)
    if not odd:
        return table
    if kept := kept_table(folder, summary):
        logger.info("the build's step table was not measured here as things are now; one that was is taken")
        return kept
    logger.warning(
        "the step table was not measured here as things are now (%s): drafts may be chosen badly; run "
        "`dspark-trt profile %s`",
        "; ".join(odd),
        folder,
    )
    return table


def keep_table(folder: Path, summary: BuildSummary, table: StepTable) -> None:
    """For the next time, where there is a place for it: a machine without one measures again."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _kept_path(folder, summary)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, table.as_json())


def kept_table(folder: Path, summary: BuildSummary) -> StepTable | None:
    """A table that `keep_table` kept for a build of these engines, under today's circumstances."""
    try:
        table = StepTable.load(_kept_path(folder, summary))
    except (OSError, RuntimeError, ManifestError):
        return None
    return None if differences(table, summary.recipe, folder) else table


def _kept_path(folder: Path, summary: BuildSummary) -> Path:
    context = Context(summary.recipe, folder)
    made_with = stage_settings(_stage(), context) | measured_with(context)
    return default_cache_folder() / "step_tables" / f"{hash_key(summary.stages['engines'], made_with)}.json"


def _stage() -> Stage:
    (stage,) = (each for each in STAGES if each.name == STAGE)
    return stage


def differences(table: StepTable, recipe: BuildRecipe, folder: Path) -> list[str]:
    """What was different where the table was measured: machine, threads, versions of the engine's packages."""
    here = measured_with(Context(recipe, folder))
    return [
        _difference(name, table.provenance.get(name), value)
        for name, value in here.items()
        if _differ(table.provenance.get(name), value)
    ]


def _difference(name: str, measured: Any, here: Any) -> str:
    """For a person; of two dictionaries, what differs."""
    if isinstance(measured, dict) and isinstance(here, dict):
        odd = [each for each in here if each in measured and measured[each] != here[each]]
        measured, here = (", ".join(f"{each} {facts[each]}" for each in odd) for facts in (measured, here))
    return f"{name}: measured with {measured}, here {here}"


def _differ(measured: Any, here: Any) -> bool:
    """Whether both are known and differ; of two dictionaries, what both have."""
    if isinstance(measured, dict) and isinstance(here, dict):
        return any(measured[name] != here[name] for name in measured.keys() & here.keys())
    return measured is not None and measured != here
