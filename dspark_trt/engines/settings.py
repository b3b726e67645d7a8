"""engines/engine.json: what is decided at build time and needed to open the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dspark_trt.errors import ManifestError
from dspark_trt.machine.gpu import Gpu

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


def read_engine_settings(build: Path) -> EngineSettings:
    """engine.json of the build directory `build`. Raises ManifestError when it is missing or not readable."""
    path = build / ENGINE_FOLDER / ENGINE_FILE
    try:
        return EngineSettings.model_validate_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(f"{path} does not exist: not a finished build; run `dspark-trt build`") from None
    except (OSError, ValidationError) as error:
        raise ManifestError(f"{path} cannot be read ({error}); run `dspark-trt build` again") from None
