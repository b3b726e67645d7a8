"""The manifests of a finished build; of an unfinished one, how far it has come and what is left to do."""

from __future__ import annotations

from pathlib import Path

from dspark_trt.building.limits import check_fixed
from dspark_trt.building.manifest import (
    MANIFEST_NAME,
    STAGE_NAMES,
    BuildSummary,
    StageManifest,
    check_chain,
    check_outputs,
    check_outputs_exist,
    read_manifest,
    read_summary,
)
from dspark_trt.checkpoints.spec_json import read_draft_source
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.engines.open import check_device
from dspark_trt.engines.settings import EngineSettings, read_engine_settings
from dspark_trt.errors import ManifestError
from dspark_trt.packaging.model_repo import REPOSITORY_NAME
from dspark_trt.steptable.table import StepTable


def read_finished(build: Path) -> tuple[BuildSummary, dict[str, StageManifest]]:
    """The summary and the manifest of every stage, chain checked; no output is looked at.

    Raises ManifestError when the build is unfinished, and says what is there and for which device; when it was edited
    or is mixed from several builds.
    """
    if not (build / MANIFEST_NAME).exists() and (made := _made(build)):
        settings = _engines_made(build, made)
        device = f" (for {settings.device})" if settings else ""
        where = "" if settings is None or settings.backend == "onnxruntime" else " on the machine that will serve"
        raise ManifestError(
            f"{build} is not a finished build: expected {', '.join(STAGE_NAMES)}, found {', '.join(made)}{device}; "
            f"run the same `dspark-trt build` again{where}, which keeps what is there"
        )
    summary = read_summary(build)
    stages = {name: read_manifest(build / name) for name in summary.stages}
    check_chain(build, summary, stages)
    return summary, stages


def _made(build: Path) -> list[str]:
    """The stages that are there, up to the first that is not."""
    made = []
    for name in STAGE_NAMES:
        try:
            read_manifest(build / name)
        except ManifestError:
            break
        made.append(name)
    return made


def _engines_made(build: Path, made: list[str]) -> EngineSettings | None:
    return read_engine_settings(build) if "engines" in made else None


def check_servable(build: Path, scheduler: SchedulerConfig | None = None) -> None:
    """All that can be said against serving `build` before a server is started.

    Args:
        scheduler: the one asked for; None: the build's own.

    Raises ManifestError when the build is unfinished, incomplete or edited, EnvironmentMissingError when its engines
    are for another machine, RecipeError when the scheduler does not go with the drafter.
    """
    stages = read_finished(build)[1]
    check_device(build)
    for name, manifest in stages.items():
        if name == REPOSITORY_NAME:  # an operator may edit its config.pbtxt
            check_outputs_exist(build / name, manifest)
        else:
            check_outputs(build / name, manifest)
    StepTable.load(build / "steptable" / "step_table.json")
    gamma = read_draft_source(build).gamma
    if scheduler is not None:
        check_fixed(scheduler.verify_len, gamma, "--scheduler")
