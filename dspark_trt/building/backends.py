"""Which backend builds, in which precision and for which GPUs;
and whether this machine can do it, before the first stage.

`auto` takes the best that is there: `tensorrt`, `tensorrt_rtx`, else `onnxruntime`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from dspark_trt.building.recipe import Backend, BuildRecipe
from dspark_trt.contract.precision import Precision
from dspark_trt.engines.tensorrt.library import Library, check_library, check_sms
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError, RecipeError
from dspark_trt.log import get_logger
from dspark_trt.machine.gpu import Gpu, NoGpu, look_for_gpu
from dspark_trt.machine.packages import compiler_lacks, device_runtime_lacks

logger = get_logger(__name__)

PRECISIONS: dict[Backend, tuple[Precision, ...]] = {  # the first is the default
    "onnxruntime": ("fp32", "int8", "int4"),
    "tensorrt": ("bf16", "fp16"),
    "tensorrt_rtx": ("bf16", "fp16"),
}
_LIBRARIES: tuple[Library, ...] = ("tensorrt", "tensorrt_rtx")  # the better one first
_ON_GPUS = "use --backend tensorrt or --backend tensorrt_rtx"
_AHEAD_OF_TIME = (
    "`--backend tensorrt_rtx --compute-capability SM` (89, for example) compiles ahead of time for RTX cards"
)
_WITHOUT_GPU = f"without a GPU, `--backend onnxruntime` builds for this CPU, and {_AHEAD_OF_TIME}"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Backend, precision and compute capabilities as they will be built: no `auto` and no None."""

    recipe: BuildRecipe
    reason: str  # why this backend, for a person


def resolve_backend(recipe: BuildRecipe) -> BuildRecipe:
    """The recipe as `choose_backend` has it."""
    return choose_backend(recipe).recipe


def choose_backend(recipe: BuildRecipe) -> BackendChoice:
    """Raises RecipeError when what is asked for does not go together; EnvironmentMissingError with everything that this
    machine lacks."""
    backend, reason = _best(recipe) if recipe.backend == "auto" else (recipe.backend, "asked for")
    _check_combination(recipe, backend)
    sms: tuple[int, ...] = ()
    if backend in ("tensorrt", "tensorrt_rtx"):
        gpu = look_for_gpu()
        _check_sms_asked_for(recipe.compute_capabilities, backend)
        targets = recipe.compute_capabilities or _sms_here(gpu)
        if lacks := list(_lacks(backend, gpu, targets)):
            raise EnvironmentMissingError(f"backend {backend} cannot build here: {'. Also: '.join(lacks)}")
        sms = targets if backend == "tensorrt_rtx" else ()
    precision = recipe.precision or PRECISIONS[backend][0]
    logger.info("backend: %s, %s", backend, precision)
    resolved = recipe.model_copy(update={"backend": backend, "precision": precision, "compute_capabilities": sms})
    return BackendChoice(resolved, reason)


def _best(recipe: BuildRecipe) -> tuple[Backend, str]:
    """The best backend that has the precision asked for, and why it is that one: where a GPU stays unused, a
    warning."""
    if recipe.precision in PRECISIONS["onnxruntime"]:
        return "onnxruntime", f"engines of {recipe.precision} are made by onnxruntime only"
    if not recipe.has_drafter_model and recipe.precision is None:
        return "onnxruntime", f"drafter {recipe.drafter} runs on onnxruntime only"
    gpu = look_for_gpu()
    reasons = [str(gpu)]
    for library in _LIBRARIES if isinstance(gpu, Gpu) else ():
        if not (lacks := list(_lacks(library, gpu, _sms_here(gpu)))):
            return library, f"the best for {gpu}"
        reasons.append(f"{library}: {'; '.join(lacks)}")
    found = ". ".join(reasons)
    if recipe.precision is not None:
        raise EnvironmentMissingError(
            f"precision {recipe.precision} is for the backends tensorrt and tensorrt_rtx, and this machine can use "
            f"neither ({found}); leave --precision out to build for its CPU, or name the backend: {_AHEAD_OF_TIME}"
        )
    is_unused = isinstance(gpu, Gpu) or gpu.has_driver
    fix = f"; a GPU stays unused: {gpu.fix}" if is_unused and isinstance(gpu, NoGpu) else ""
    logger.log(logging.WARNING if is_unused else logging.INFO, "backend: onnxruntime, found %s%s", found, fix)
    return "onnxruntime", f"found {found}"


def _check_combination(recipe: BuildRecipe, backend: Backend) -> None:
    if not recipe.has_drafter_model and backend != "onnxruntime":
        raise RecipeError(
            f"drafter: {recipe.drafter} runs on backend onnxruntime only, found {backend}; use --backend onnxruntime, "
            "or give a drafter's checkpoint"
        )
    known = PRECISIONS[backend]
    if recipe.precision is not None and recipe.precision not in known:
        why, instead = (
            ("ONNX Runtime has no such kernels for a CPU", _ON_GPUS)
            if backend == "onnxruntime"
            else ("its attention kernels are of 16 bits, and it quantises nothing", "use --backend onnxruntime")
        )
        raise RecipeError(
            f"precision: backend {backend} expects {' or '.join(known)}, found {recipe.precision}: {why}; {instead}, "
            f"or leave --precision out for {known[0]}"
        )
    if recipe.compute_capabilities and backend != "tensorrt_rtx":
        raise RecipeError(
            f"compute_capabilities: found {list(recipe.compute_capabilities)} with backend {backend}, which builds "
            "for the machine it runs on; leave --compute-capability out, or use --backend tensorrt_rtx"
        )
    if recipe.num_threads is not None and backend != "onnxruntime":
        raise RecipeError(
            f"num_threads: found {recipe.num_threads} with backend {backend}, whose engines run on a GPU; leave "
            "--num-threads out, or use --backend onnxruntime"
        )
    if not recipe.uses_cuda_graphs and backend == "onnxruntime":
        raise RecipeError(
            "cuda_graphs: found off with backend onnxruntime, whose engines run on a CPU; leave --cuda-graphs out, or "
            f"{_ON_GPUS}"
        )


def _check_sms_asked_for(sms: tuple[int, ...], library: Library) -> None:
    """No other machine makes them either. Raises RecipeError."""
    try:
        check_sms(library, sms)
    except EngineBuildError as error:
        raise RecipeError(f"compute_capabilities: found {list(sms)}: {error}") from None


def _lacks(library: Library, gpu: Gpu | NoGpu, sms: tuple[int, ...]) -> Iterator[str]:
    """What is missing here for building engines for `sms`, each with what to do about it.

    Engines for other GPUs than the one here are compiled only: the device runtime is needed where they are timed and
    run.
    """
    if not sms and isinstance(gpu, NoGpu):
        yield f"{gpu}, and engines are compiled and timed on the GPU that serves: {gpu.fix}; {_WITHOUT_GPU}"
    try:
        check_sms(library, sms)
    except EngineBuildError as error:
        yield str(error)
    try:
        check_library(library)
    except EnvironmentMissingError as error:
        yield str(error)
    yield from compiler_lacks()
    if set(_sms_here(gpu)) & set(sms):
        yield from device_runtime_lacks()


def _sms_here(gpu: Gpu | NoGpu) -> tuple[int, ...]:
    return (gpu.sm,) if isinstance(gpu, Gpu) else ()
