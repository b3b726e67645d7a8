"""Opens the engines of a build directory with the backend that they were built for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dspark_trt.engines.protocol import DraftEngine, TargetEngine
from dspark_trt.errors import ManifestError

ENGINE_FILE = "engine.json"


class EngineSettings(BaseModel):
    """engines/engine.json: what is decided at build time and needed to open the engines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["onnxruntime"]
    num_threads: int | None = None  # None: the cores of the process that opens them


def open_engines(build: Path) -> tuple[TargetEngine, DraftEngine]:
    """Open target and drafter of the build directory `build`.

    Raises ManifestError when engine.json is not readable, EnvironmentMissingError when the backend's package is missing,
    EngineBuildError when an engine cannot be opened.
    """
    path = build / "engines" / ENGINE_FILE
    try:
        settings = EngineSettings.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise ManifestError(f"{path} cannot be read ({error}); run `dspark-trt build` again") from None
    from dspark_trt.engines import onnxruntime_engines

    return onnxruntime_engines.open_engines(
        build / "graphs", onnxruntime_engines.OnnxRuntimeSettings(num_threads=settings.num_threads)
    )
