"""The Triton model repository of a build: four configurations and the thin models that come with the package.

A model finds its build by a path relative to its own folder, symlinks resolved, so the build directory can be moved,
copied or mounted elsewhere as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from dspark_trt.errors import ManifestError
from dspark_trt.packaging.pbtxt import ModelConfig, set_parameter
from dspark_trt.packaging.signature import POSTPROCESSING, PREPROCESSING, model_configs

REPOSITORY_NAME = "triton_model_repo"  # of a build directory
DEFAULT_SCHEDULER = "auto"
_CODE_PACKAGE = "dspark_trt_model_repo"
_ENGINE_CODE = "dspark"  # whatever the model is called
_ENSEMBLE_NOTE = "An ensemble has no code of its own; Triton wants a version folder that is not lost on the way.\n"


def write_model_repo(
    build_dir: Path,
    destination: Path,
    *,
    engine_model_name: Literal["dspark", "tensorrt_llm"] = "dspark",
    scheduler: str = DEFAULT_SCHEDULER,
) -> None:
    """Write ensemble/, preprocessing/, <engine model>/ and postprocessing/ into `destination`.

    `destination` may be renamed within its folder afterwards: models refer to `build_dir` by a relative path.
    """
    build_directory = os.path.relpath(build_dir.resolve(), destination.resolve() / engine_model_name)
    for config in model_configs(engine_model_name, build_directory=build_directory, scheduler=scheduler):
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


def overlay_model_repo(build_dir: Path, destination: Path, *, scheduler: str | None = None) -> None:
    """A repository in the empty folder `destination` that differs from the build's own in the scheduler at most.

    Its models are symlinks, so that they still find the build, in folders of their own, where Python may keep bytecode.
    """
    repository = model_repository_of(build_dir)
    for model in sorted(path.parent for path in repository.glob("*/config.pbtxt")):
        config = (model / "config.pbtxt").read_text()
        if scheduler is not None and 'key: "scheduler"' in config:
            config = set_parameter(config, "scheduler", scheduler)
        version = destination / model.name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config)
        for file in (model / "1").iterdir():
            if file.is_file():
                (version / file.name).symlink_to(file)


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
    return {key: value["string_value"] for key, value in config["parameters"].items()}


def build_directory_of(arguments: Mapping[str, str]) -> Path:
    """Where the build of a model lies, from what Triton hands to `initialize`."""
    code = Path(arguments["model_repository"], arguments["model_version"], "model.py").resolve()
    return (code.parents[1] / model_parameters(arguments)["build_directory"]).resolve()
