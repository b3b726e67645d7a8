"""The build: two checkpoints in, one directory out, stage by stage.

    checkpoint -> graph -> engine -> step table + calibration -> model repository

Each stage is a folder with a manifest (see manifest.py). A stage that is there and matches is kept; a stage that failed
or was interrupted leaves nothing, and the next run goes on from there.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_trt.building.backends import resolve_backend
from dspark_trt.building.context import Context
from dspark_trt.building.limits import check_recipe
from dspark_trt.building.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    STAGE_NAMES,
    BuildSummary,
    FileRecord,
    StageManifest,
    check_outputs,
    code_hash,
    is_stage_folder,
    now,
    read_manifest,
    read_summary,
    record_inputs,
    record_outputs,
    sealed_json,
    stage_key,
    write_manifest,
)
from dspark_trt.building.plan import make_plan
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.building.stages import STAGES, Stage
from dspark_trt.errors import ManifestError, RecipeError
from dspark_trt.files import open_lock, remove_partial, replace_folder, write_atomically
from dspark_trt.log import get_logger
from dspark_trt.machine.packages import DEVICE_DISTRIBUTIONS, installed_versions

logger = get_logger(__name__)

StageProgress = Callable[[str, float], None]  # stage, fraction done 0..1


@dataclass(frozen=True, slots=True)
class StageResult:
    stage: str
    was_built: bool
    seconds: float


def build(
    recipe: BuildRecipe,
    output: Path,
    *,
    verify: bool = False,
    progress: StageProgress = lambda stage, fraction: None,
) -> list[StageResult]:
    """Make or complete the build directory `output`.

    Args:
        verify: hash kept files again instead of trusting size, modification time and inode.

    Raises: RecipeError, CheckpointError, PairingError, ExportError, EngineBuildError, EnvironmentMissingError;
        ManifestError
        when `output` holds something that is not a build, or another build is running in it.
    """
    recipe = make_plan(recipe, output).recipe
    _claim(output)
    context = Context(recipe, output)
    results: list[StageResult] = []
    keys: dict[str, str] = {}
    with exclusive(output):
        for stage in STAGES:
            start = time.perf_counter()
            progress(stage.name, 0.0)
            keys[stage.name], was_built = _complete(stage, context, keys, verify, progress)
            progress(stage.name, 1.0)
            results.append(StageResult(stage.name, was_built, time.perf_counter() - start))
        resolved = recipe.model_copy(update={"max_seq_len": context.limits.max_seq_len})
        summary = BuildSummary(schema_version=SCHEMA_VERSION, recipe=resolved, stages=keys)
        write_atomically(output / MANIFEST_NAME, sealed_json(summary.model_dump(mode="json")))
    return results


def resolve(recipe: BuildRecipe) -> BuildRecipe:
    """No `auto` after this point, and a machine that can build it. Raises RecipeError, EnvironmentMissingError."""
    check_recipe(recipe)
    return resolve_backend(recipe)


def _complete(
    stage: Stage, context: Context, keys: Mapping[str, str], verify: bool, progress: StageProgress
) -> tuple[str, bool]:
    folder = context.output / stage.name
    remove_partial(folder)
    known = _known_manifest(folder)
    inputs = record_inputs(stage.inputs(context), known.inputs if known and not verify else {})
    predecessors = {name: keys[name] for name in stage.predecessors}
    settings = stage_settings(stage, context)
    key = stage_key(stage.name, settings, predecessors, inputs)
    if known is not None and known.key == key and _is_intact(folder, known, verify):
        logger.info("%s: kept", stage.name)
        return key, False
    return make_stage(stage, context, keys, inputs, progress), True


def make_stage(
    stage: Stage, context: Context, keys: Mapping[str, str], inputs: dict[str, FileRecord], progress: StageProgress
) -> str:
    """Make a stage whether or not it is there, replace the old one when it is done, and return its key.

    keys: of the stages before it, by name.
    """
    folder = context.output / stage.name
    predecessors = {name: keys[name] for name in stage.predecessors}
    settings = stage_settings(stage, context)
    key = stage_key(stage.name, settings, predecessors, inputs)
    logger.info("%s: building", stage.name)
    with replace_folder(folder) as scratch:
        with _errors_in(folder):
            stage.make(context, scratch, lambda fraction: progress(stage.name, fraction))
        manifest = StageManifest(
            schema_version=SCHEMA_VERSION,
            stage=stage.name,
            key=key,
            settings=settings,
            predecessors=predecessors,
            inputs=inputs,
            outputs=record_outputs(scratch),
            created=now(),
            versions=_versions(),
        )
        write_manifest(scratch, manifest)
    return key


def stage_settings(stage: Stage, context: Context) -> dict[str, Any]:
    """What decides a stage beside its input files and the stages before it: settings, and the code that makes it."""
    return stage.settings(context) | {"code": {name: code_hash(name) for name in stage.packages(context)}}


@contextmanager
def _errors_in(folder: Path) -> Iterator[None]:
    """A write that fails, on a full disk for example, does not say where; the stage's folder is named then."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error


def _known_manifest(folder: Path) -> StageManifest | None:
    try:
        return read_manifest(folder)
    except ManifestError:
        return None


def _is_intact(folder: Path, manifest: StageManifest, verify: bool) -> bool:
    try:
        check_outputs(folder, manifest, verify=verify)
    except ManifestError as error:
        logger.warning("%s", error)
        return False
    return True


def _versions() -> dict[str, str]:
    return installed_versions("dspark-trt", "numpy", "onnx", "onnxruntime", *DEVICE_DISTRIBUTIONS)


def _claim(output: Path) -> None:
    """Make the directory, or see to it that nothing in it is lost. Raises ManifestError when it is not ours to use."""
    if output.exists() and not output.is_dir():
        raise ManifestError(f"--output {output} is a file; expected a directory of its own for the build")
    try:
        output.mkdir(parents=True, exist_ok=True)
        strangers = sorted(path.name for path in output.iterdir() if not _is_of_a_build(path))
    except OSError as error:
        raise RecipeError(
            f"--output {output} cannot be used ({error.strerror}); give a directory that can be made and written"
        ) from None
    if strangers and not _is_finished(output):
        raise ManifestError(
            f"--output {output} holds {strangers[:3]}, which no build made; give an empty or new directory"
        )


def _is_finished(output: Path) -> bool:
    try:
        read_summary(output)
    except ManifestError:
        return False
    return True


def _is_of_a_build(path: Path) -> bool:
    if path.name in STAGE_NAMES:  # a folder of the user's may have such a name, too
        return is_stage_folder(path) or (path.is_dir() and not any(path.iterdir()))
    return path.name in (MANIFEST_NAME, ".lock") or path.name.endswith(".partial")


@contextmanager
def exclusive(output: Path) -> Iterator[None]:
    """Nobody else builds in `output` meanwhile. Raises ManifestError when somebody does."""
    try:
        opened = open_lock(output / ".lock")
    except OSError as error:
        raise ManifestError(
            f"{output / '.lock'} cannot be opened ({error.strerror}): expected a file of our own, no link; remove it"
        ) from None
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ManifestError(f"another build is running in {output}; wait for it or give another --output") from None
        try:
            yield
        finally:
            if [path.name for path in output.iterdir()] == [".lock"]:  # a first build that made nothing leaves nothing
                (output / ".lock").unlink()
                output.rmdir()
