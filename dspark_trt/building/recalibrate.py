"""The calibration of a finished build, measured again for longer or on other prompts, or replaced by a given one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dspark_trt.building.calibration_stage import fit_to, given_for, measure
from dspark_trt.building.context import Context
from dspark_trt.building.renew import renew
from dspark_trt.building.stages import STAGES
from dspark_trt.calibration.file import CALIBRATION_FILE, CalibrationFile, load_calibration
from dspark_trt.calibration.prompts import Prompt
from dspark_trt.calibration.record import Recorder
from dspark_trt.errors import ManifestError
from dspark_trt.log import Progress

STAGE = "calibration"


def recalibrate(
    folder: Path,
    prompts: Sequence[Prompt],
    *,
    budget_s: float,
    max_tokens: int,
    num_samples: int,
    record: Callable[..., Recorder] | None = None,
    progress: Progress = lambda fraction: None,
) -> CalibrationFile:
    """Measure on `prompts` and put the result into the build, neutral where they give too few blocks.

    record: called with `progress`, has them answered elsewhere, on engines of this build; None: here.

    Raises as `renew`, and what `record` raises.
    """
    effort = {"max_tokens": max_tokens, "num_samples": num_samples}

    def make(context: Context, report: Progress) -> CalibrationFile:
        if record is None:
            return measure(context, prompts, budget_s=budget_s, progress=report, **effort)
        return fit_to(folder, record(progress=report), prompts, {"budget_s": budget_s, **effort})

    return _replace(folder, make, progress, is_measured=record is None)


def import_calibration(folder: Path, path: Path) -> CalibrationFile:
    """Put a given file into the build (see calibration/given.py); no engine is opened.

    What the build has measured and the file does not say stays: survival, and acceptance of copied drafts.

    Raises RecipeError when the file is not acceptable, else as `renew`.
    """
    given = given_for(folder, path, said_in="--import")
    known = _known(folder, len(given.temperatures))
    if known is not None:
        kept = {
            "survival": given.survival or known.survival,
            "blocks": given.blocks or known.blocks,
            "lookup": given.lookup or known.lookup,
        }
        given = given.model_copy(update=kept)
    return _replace(folder, lambda context, report: given, lambda fraction: None, is_measured=False)


def _known(folder: Path, gamma: int) -> CalibrationFile | None:
    """The build's own, unless it is what has to be replaced."""
    try:
        return load_calibration(folder / STAGE / CALIBRATION_FILE, gamma=gamma)
    except ManifestError:
        return None


def _replace(
    folder: Path, make: Callable[[Context, Progress], CalibrationFile], progress: Progress, *, is_measured: bool
) -> CalibrationFile:
    found: list[CalibrationFile] = []

    def write(context: Context, scratch: Path, report: Progress) -> None:
        found.append(make(context, report))
        found[0].save(scratch / CALIBRATION_FILE)

    (stage,) = (each for each in STAGES if each.name == STAGE)
    renew(folder, replace(stage, make=write), progress, is_measured=is_measured)
    return found[0]
