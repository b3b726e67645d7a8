"""One stage of a finished build, made again alone; its chain stays valid.

The stage keeps the key that `build` would give it today: what is measured again is kept by the next build.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dspark_trt.building.build import exclusive, make_stage
from dspark_trt.building.context import Context
from dspark_trt.building.finished import read_finished
from dspark_trt.building.manifest import MANIFEST_NAME, StageManifest, check_outputs, sealed_json
from dspark_trt.building.stages import Stage
from dspark_trt.engines.open import check_device
from dspark_trt.files import write_atomically
from dspark_trt.log import Progress

MEASURED = ("checkpoints", "graphs", "engines")  # what measurements are made of


def check_measurable(folder: Path, stages: Mapping[str, StageManifest]) -> None:
    """Raises ManifestError when the engines were edited, EnvironmentMissingError when they are for another machine."""
    check_device(folder)
    for name in MEASURED:
        check_outputs(folder / name, stages[name])


def renew(folder: Path, stage: Stage, progress: Progress, *, is_measured: bool = True) -> None:
    """Make `stage` again; the old one is replaced when the new one is there.

    is_measured: on the build's engines, which have to be whole and for this machine.

    Raises ManifestError when the build is unfinished, edited or in use, EnvironmentMissingError when its engines are
    for another machine.
    """
    summary, stages = read_finished(folder)
    if is_measured:
        check_measurable(folder, stages)
    with exclusive(folder):
        inputs = stages[stage.name].inputs
        context = Context(summary.recipe, folder)
        key = make_stage(stage, context, summary.stages, inputs, lambda name, fraction: progress(fraction))
        renewed = summary.model_copy(update={"stages": {**summary.stages, stage.name: key}})
        write_atomically(folder / MANIFEST_NAME, sealed_json(renewed.model_dump(mode="json")))
