"""The Triton model repository of a build: four configurations and the thin models that come with the package.

A model finds its build by a path relative to its own folder, symlinks resolved, so the build directory can be moved,
copied or mounted elsewhere as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from dspark_trt.errors import ManifestError
from dspark_trt.packaging.model_configs import model_configs
from dspark_trt.packaging.pbtxt import ModelConfig, read_parameter
from dspark_trt.packaging.signature import POSTPROCESSING, PREPROCESSING

EngineModelName = Literal["dspark", "tensorrt_llm"]
ENGINE_MODEL_NAMES: tuple[EngineModelName, ...] = ("dspark", "tensorrt_llm")
REPOSITORY_NAME = "triton_model_repo"  # of a build directory
DEFAULT_SCHEDULER = "auto"
_CODE_PACKAGE = "dspark_trt_model_repo"
_ENGINE_CODE = "dspark"  # whatever the model is called
_ENSEMBLE_NOTE = "An ensemble has no code of its own; Triton wants a version folder that is not lost on the way.\n"


def write_model_repo(
    build_dir: Path,
    destination: Path,
    *,
    engine_model_name: EngineModelName = "dspark",
    scheduler: str = DEFAULT_SCHEDULER,
) -> None:
    """Write ensemble/, preprocessing/, <engine model>/ and postprocessing/ into `destination`.

    `destination` may be renamed within its folder afterwards: models refer to `build_dir` by a relative path.
    """
    build_directory = os.path.relpath(build_dir.resolve(), destination.resolve() / engine_model_name)
    _write_models(destination, model_configs(engine_model_name, build_directory=build_directory, scheduler=scheduler))


def _write_models(destination: Path, configs: Iterable[ModelConfig]) -> None:
    for config in configs:
        version = destination / config.name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config.text())
        if config.steps:
            (version / "README").write_text(_ENSEMBLE_NOTE)
        else:
            (version / "model.py").write_text(_code_of(config))


def _code_of(config: ModelConfig) -> str:
    folder = config.name if config.name in (PREPROCESSING, POSTPROCESSING) else _ENGINE_CODE
    return (files(_CODE_PACKAGE) / folder / "1" / "model.py").read_text()


def overlay_model_repo(
    build_dir: Path,
    destination: Path,
    *,
    scheduler: str | None = None,
    admission: str = "{}",
    control_socket: str = "",
    step_table: str = "",
    prefix_cache: str = "",
) -> None:
    """The repository of a build as this package serves it, in the empty folder `destination`.

    All of it is written by this package: of the build's own repository, only the name of its engine model and, where
    `scheduler` is None, its scheduler are read. So a model, a backend or code that somebody put there is never run.
    `admission`, `control_socket`, `step_table` and `prefix_cache` as in `model_configs`. Raises ManifestError when the
    build has no repository of ours.
    """
    engine_model_name, found = _read_repository(build_dir)
    _write_models(
        destination,
        model_configs(
            engine_model_name,
            build_directory=str(build_dir.resolve()),
            scheduler=found if scheduler is None else scheduler,
            admission=admission,
            control_socket=control_socket,
            step_table=step_table,
            prefix_cache=prefix_cache,
        ),
    )


def scheduler_of(build_dir: Path) -> str:
    """The scheduler that a build is served with unless somebody says otherwise. Raises as `overlay_model_repo`."""
    return _read_repository(build_dir)[1]


def _read_repository(build_dir: Path) -> tuple[EngineModelName, str]:
    """The name of the engine model, and its scheduler."""
    repository = model_repository_of(build_dir)
    for name in ENGINE_MODEL_NAMES:
        path = repository / name / "config.pbtxt"
        if path.is_file():
            try:
                return name, read_parameter(path.read_text(), "scheduler")
            except ValueError as error:
                raise ManifestError(f"{path}: {error}; run `dspark-trt build` again") from None
    names = ", ".join(ENGINE_MODEL_NAMES)
    raise ManifestError(f"{repository}: expected one of the models {names}, found none; run `dspark-trt build` again")


def model_repository_of(build_dir: Path) -> Path:
    """The repository of a build, as an absolute path. Raises ManifestError when it is not there."""
    repository = build_dir.resolve() / REPOSITORY_NAME
    if not (repository / "ensemble" / "config.pbtxt").is_file():
        raise ManifestError(
            f"{repository} is no model repository: {build_dir} is not a finished build; run `dspark-trt build`"
        )
    return repository


def model_parameters(arguments: Mapping[str, str]) -> dict[str, str]:
    """The parameters of config.pbtxt, from what Triton hands to `initialize`."""
    config: dict[str, Any] = json.loads(arguments["model_config"])
    return {key: value.get("string_value", "") for key, value in config["parameters"].items()}


def build_directory_of(arguments: Mapping[str, str]) -> Path:
    """Where the build of a model lies, from what Triton hands to `initialize`."""
    code = Path(arguments["model_repository"], arguments["model_version"], "model.py").resolve()
    return (code.parents[1] / model_parameters(arguments)["build_directory"]).resolve()
