"""Opens the engines of a build directory with the backend that they were built for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.checkpoints.spec import NgramSpec
from dspark_trt.checkpoints.spec_json import read_draft_source
from dspark_trt.contract.acceptance import AcceptEngine
from dspark_trt.contract.page_plan import DEFAULT_UTILIZATION
from dspark_trt.contract.protocol import DraftEngine, PageLimits, StepEngine, TargetEngine
from dspark_trt.engines.settings import read_engine_settings
from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.machine.gpu import Gpu, look_for_gpu
from dspark_trt.machine.packages import device_runtime_lacks


@dataclass(frozen=True, slots=True)
class OpenEngines:
    """The engines of one process."""

    target: TargetEngine
    drafter: DraftEngine | None  # None: drafts are copied from each request's own text
    step: StepEngine | None = None  # both on one device, where there is one
    acceptance: AcceptEngine | None = None  # on that device; None: the runtime accepts, slot by slot
    pages: PageLimits | None = None  # of engines whose rows share pages
    synchronize: Callable[[], None] = lambda: None  # wait for what the engines have enqueued
    # from now on, calls of the target have the packed tokens that this says for their requests and tokens
    pad_calls: Callable[[Callable[[int, int], int]], None] = lambda padded_tokens: None


def check_device(build: Path) -> None:
    """Whether the engines of `build` can run here; nothing of torch or TensorRT is imported, and nothing is opened.

    Raises ManifestError when engine.json is not readable; EnvironmentMissingError when this machine has another GPU or
    none, or no torch for CUDA.
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


def open_engines(
    build: Path, *, use_cuda_graphs: bool = True, gpu_memory_utilization: float = DEFAULT_UTILIZATION
) -> OpenEngines:
    """Open the target of the build directory `build`, and its drafter where it has one.

    `use_cuda_graphs`: whether engines on a GPU may record CUDA graphs; `gpu_memory_utilization`: how much of its memory
    they may take.

    Raises what check_device raises; EnvironmentMissingError when the backend's package is missing or of another
    version, EngineBuildError when an engine cannot be opened.
    """
    check_device(build)
    settings = read_engine_settings(build)
    if settings.backend == "onnxruntime":
        from dspark_trt.engines.onnxruntime import engines as onnxruntime_engines

        options = onnxruntime_engines.OnnxRuntimeSettings(num_threads=settings.num_threads)
        if isinstance(read_draft_source(build), NgramSpec):
            target = onnxruntime_engines.OnnxRuntimeTargetEngine(build / "graphs", options)
            return OpenEngines(target, None, pad_calls=target.pad_calls)
        target, drafter = onnxruntime_engines.open_engines(build / "graphs", options)
        return OpenEngines(target, drafter, pad_calls=target.pad_calls)
    from dspark_trt.engines.tensorrt.engines import open_tensorrt_engines
    from dspark_trt.engines.tensorrt.library import check_library

    if (found := check_library(settings.backend)) != settings.library_version:
        raise EnvironmentMissingError(
            f"{build} holds engines of {settings.backend} {settings.library_version}, which no other version opens, "
            f"found {found}; install that version, or run `dspark-trt build` again"
        )
    engines = open_tensorrt_engines(
        build, settings, use_cuda_graphs=use_cuda_graphs, gpu_memory_utilization=gpu_memory_utilization
    )
    return OpenEngines(
        engines.target, engines.drafter, engines.step, engines.acceptance, engines.pages, engines.synchronize
    )
