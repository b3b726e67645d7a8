"""Which GPUs a build is for: those asked for, or the one here."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_trt_plugins.bundle import kernel_sm

from dspark_trt.engines.tensorrt.library import LIBRARIES, Library, check_sms
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError
from dspark_trt.machine.gpu import Gpu, look_for_gpu


@dataclass(frozen=True, slots=True)
class CompileTargets:
    """GPU architectures of a build."""

    sms: tuple[int, ...]
    kernel_sms: tuple[int, ...]  # what the plugins' kernels are compiled for, so that they run on all of `sms`
    device_bytes: int | None  # memory of the GPU here; None where it is not the only one that the build is for


def compile_targets(library: Library, sms: tuple[int, ...], *, use_plugins: bool) -> CompileTargets:
    """Resolve `sms`, empty for the GPU here.

    Raises EnvironmentMissingError when a GPU is needed and there is none, EngineBuildError when the package does not
    compile for one of the architectures.
    """
    if sms and LIBRARIES[library].takes_sms:
        return _targets(library, tuple(sorted(set(sms))), None, use_plugins)
    gpu = look_for_gpu()
    if not isinstance(gpu, Gpu):
        elsewhere = "or give --compute-capability" if LIBRARIES[library].takes_sms else "or build on its host"
        raise EnvironmentMissingError(
            f"{library} compiles for the GPU here, and there is {gpu}; {gpu.fix}, {elsewhere}"
        )
    if sms and set(sms) != {gpu.sm}:
        raise EngineBuildError(
            f"{library} compiles for the GPU that it runs on, {gpu}, and not for SM {' '.join(map(str, sms))}; build "
            "on the GPU that will serve"
        )
    return _targets(library, (gpu.sm,), gpu.memory_bytes, use_plugins)


def _targets(library: Library, sms: tuple[int, ...], device_bytes: int | None, use_plugins: bool) -> CompileTargets:
    check_sms(library, sms, use_plugins=use_plugins)
    kernel_sms = {kernel for sm in sms if (kernel := kernel_sm(sm)) is not None}
    return CompileTargets(sms, tuple(sorted(kernel_sms)), device_bytes)
