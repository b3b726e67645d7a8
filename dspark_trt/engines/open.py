"""Opens the engines of a build directory with the backend that they were built for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dspark_trt.contract.protocol import DraftEngine, StepEngine, TargetEngine
from dspark_trt.errors import EnvironmentMissingError, ManifestError
from dspark_trt.machine.gpu import Gpu, look_for_gpu
from dspark_trt.machine.packages import device_runtime_lacks

ENGINE_FOLDER = "engines"  # of a build directory
ENGINE_FILE = "engine.json"


class GpuIdentity(BaseModel):
    """The GPU that engines were compiled on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    sm: int  # 10 * major + minor of the compute capability


class EngineSettings(BaseModel):
    """engines/engine.json: what is decided at build time and needed to open the engines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["onnxruntime", "tensorrt", "tensorrt_rtx"]
    num_threads: int | None = None  # onnxruntime; None: the cores of the process that opens them
    library_version: str | None = None  # of tensorrt or tensorrt_rtx: no other version opens the engines
    sms: tuple[int, ...] = ()  # GPU architectures that the engines have code for
    gpu: GpuIdentity | None = None  # tensorrt: the model of GPU that they are for; None: any of `sms`

    @property
    def device(self) -> str:
        """What the engines are for, in words."""
        if self.backend == "onnxruntime":
            return "CPU"
        listed = f"SM {', '.join(map(str, self.sms))}"
        return f"{self.gpu.name} ({listed})" if self.gpu else f"GPUs of {listed}"

    def is_for(self, gpu: Gpu) -> bool:
        """Whether the engines run on this GPU, at the speed that they were built for."""
        return gpu.sm in self.sms and (self.gpu is None or self.gpu.name == gpu.name)


@dataclass(frozen=True, slots=True)
class OpenEngines:
    """The engines of one process."""

    target: TargetEngine
    drafter: DraftEngine
    step: StepEngine | None = None  # both on one device, where there is one
    synchronize: Callable[[], None] = lambda: None  # wait for what the engines have enqueued


def read_engine_settings(build: Path) -> EngineSettings:
    """engine.json of the build directory `build`. Raises ManifestError when it is missing or not readable."""
    path = build / ENGINE_FOLDER / ENGINE_FILE
    try:
        return EngineSettings.model_validate_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(f"{path} does not exist: not a finished build; run `dspark-trt build`") from None
    except (OSError, ValidationError) as error:
        raise ManifestError(f"{path} cannot be read ({error}); run `dspark-trt build` again") from None


def check_device(build: Path) -> None:
    """Whether the engines of `build` can run here; nothing of torch or TensorRT is imported, and nothing is opened.

    Raises ManifestError when engine.json is not readable; EnvironmentMissingError when this machine has another GPU or none, or
    no torch for CUDA.
    """
    settings = read_engine_settings(build)
    if settings.backend == "onnxruntime":
        return
    gpu = look_for_gpu()
    if not (isinstance(gpu, Gpu) and settings.is_for(gpu)):
        raise EnvironmentMissingError(
            f"{build} holds engines for {settings.device}, found {gpu}; run it there, or build for this machine: "
            "dspark-trt build --output OTHER_DIR ..."
        )
    if lacks := list(device_runtime_lacks()):
        raise EnvironmentMissingError(f"{build} holds engines for {settings.device}: {'; '.join(lacks)}")


def open_engines(build: Path) -> OpenEngines:
    """Open target and drafter of the build directory `build`.

    Raises what check_device raises; EnvironmentMissingError when the backend's package is missing or of another version,
    EngineBuildError when an engine cannot be opened.
    """
    check_device(build)
    settings = read_engine_settings(build)
    if settings.backend == "onnxruntime":
        from dspark_trt.engines.onnxruntime import engines as onnxruntime_engines

        options = onnxruntime_engines.OnnxRuntimeSettings(num_threads=settings.num_threads)
        return OpenEngines(*onnxruntime_engines.open_engines(build / "graphs", options))
    from dspark_trt.engines.tensorrt.engines import open_tensorrt_engines
    from dspark_trt.engines.tensorrt.library import check_library

    if (found := check_library(settings.backend)) != settings.library_version:
        raise EnvironmentMissingError(
            f"{build} holds engines of {settings.backend} {settings.library_version}, which no other version opens, found {found}; "
            "install that version, or run `dspark-trt build` again"
        )
    engines = open_tensorrt_engines(build, settings)
    return OpenEngines(engines.target, engines.drafter, engines.step, engines.synchronize)
