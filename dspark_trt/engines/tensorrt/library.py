"""What differs between the two packages `tensorrt` and `tensorrt_rtx`, in one place.

`tensorrt` compiles for the GPU that it runs on. `tensorrt_rtx` compiles ahead of time for the GPUs that it is told,
without having one, but not for data-centre GPUs after the A100.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspark_trt_plugins.bundle import kernel_sm
from dspark_trt_plugins.trt_plugin import FULL, MINIMUM_VERSION, RTX, load_tensorrt

from dspark_trt.errors import EngineBuildError, EnvironmentMissingError
from dspark_trt.log import get_logger
from dspark_trt.machine.packages import install_extra

logger = get_logger(__name__)

Library = Literal["tensorrt", "tensorrt_rtx"]

# SM that the compilers make code for: TensorRT 11 support matrix; RTX 1.7.1 by trying (trt.ComputeCapability lists the
# same)
SUPPORTED_SMS: Mapping[Library, tuple[int, ...]] = {
    "tensorrt": (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121),
    "tensorrt_rtx": (75, 80, 86, 89, 120, 121),
}
_GPUS = {75: "T4", 80: "A100", 86: "A10, A40", 89: "L4, L40S", 90: "H100, H200", 100: "B200", 103: "B300", 110: "Thor"}
_REMINDER = "Int64 binding"  # of every int64 input and output, which are so on purpose


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """What one package needs and has."""

    install: str
    minimum_version: tuple[int, int]
    takes_sms: bool  # compiles for GPUs that it is told; otherwise for the one it runs on
    has_timing_cache: bool  # tactics are measured at build time and kept


LIBRARIES: Mapping[Library, LibraryFacts] = {
    "tensorrt": LibraryFacts('pip install "tensorrt>=11.1"', MINIMUM_VERSION, takes_sms=False, has_timing_cache=True),
    "tensorrt_rtx": LibraryFacts(install_extra("tensorrt-rtx"), (1, 7), takes_sms=True, has_timing_cache=False),
}
assert set(LIBRARIES) == {FULL, RTX}


def check_library(name: Library) -> str:
    """The version of the package. Raises EnvironmentMissingError with the command that installs it."""
    return str(import_library(name).__version__)


def import_library(name: Library) -> Any:
    """The package's module. Raises EnvironmentMissingError with the command that installs it."""
    facts = LIBRARIES[name]
    wanted = ".".join(map(str, facts.minimum_version))
    remedy = f"install it: {facts.install}"
    try:
        trt = load_tensorrt(name)
    except (ImportError, OSError) as error:  # OSError: a shared library of the package cannot be loaded
        raise EnvironmentMissingError(
            f"the backend {name} needs the package {name} {wanted} or later, which cannot be imported ({error}); "
            f"{remedy}"
        ) from None
    if tuple(int(part) for part in trt.__version__.split(".")[:2]) < facts.minimum_version:
        raise EnvironmentMissingError(
            f"the backend {name} needs the package {name} {wanted} or later, found {trt.__version__}; {remedy}"
        )
    return trt


def check_sms(name: Library, sms: Sequence[int], *, use_plugins: bool = True) -> None:
    """Raises EngineBuildError when the compiler, or that of the plugins' kernels,
    makes no code for a GPU architecture."""
    for sm in sms:
        usable = usable_sms(name, use_plugins=use_plugins)
        if sm not in SUPPORTED_SMS[name]:
            elsewhere = name != FULL and sm in usable_sms("tensorrt", use_plugins=use_plugins)
            remedy = "; use --backend tensorrt" if elsewhere else f": expected one of SM {_listed(usable)}"
            raise EngineBuildError(f"{name} has no code for {_describe(sm)}{remedy}")
        if sm not in usable:
            raise EngineBuildError(
                f"the kernels of the plugins have no code for {_describe(sm)}: expected one of SM "
                f"{_listed(usable)}; use another GPU"
            )


def usable_sms(name: Library, *, use_plugins: bool = True) -> tuple[int, ...]:
    """The GPU architectures that engines can be built for."""
    return tuple(sm for sm in SUPPORTED_SMS[name] if not use_plugins or kernel_sm(sm) is not None)


def _describe(sm: int) -> str:
    return f"SM {sm} ({_GPUS[sm]})" if sm in _GPUS else f"SM {sm}"


def _listed(sms: Sequence[int]) -> str:
    return " ".join(map(str, sms))


class BuildLog:
    """What TensorRT says from now on: warnings and worse are kept and go to the log of dspark_trt,
    information at debug.

    TensorRT has one logger in a process, the first that it is given, and ignores every other one. So all builds and
    runtimes share one here, and it writes into the youngest BuildLog.
    """

    def __init__(self, trt: Any) -> None:
        self._problems: list[str] = []
        self.logger = _process_logger(trt)
        self.logger.logs = [reference for reference in self.logger.logs if reference() is not None]
        self.logger.logs.append(weakref.ref(self))

    def write(self, level: int | None, message: str) -> None:
        """`level` of the log of dspark_trt; None for verbose messages, which it does not take."""
        if level is None or _REMINDER in message:
            return
        logger.log(level, "%s", message)
        if level == logging.WARNING:
            self._problems.append(message)

    @property
    def problems(self) -> tuple[str, ...]:
        """Warnings and errors since the last `take`."""
        return tuple(self._problems)

    def take(self) -> tuple[str, ...]:
        """The problems so far; the next ones are collected anew."""
        taken = tuple(self._problems)
        self._problems.clear()
        return taken


@functools.cache
def _process_logger(trt: Any) -> Any:
    """The ILogger of this process: it lives as long, and hands every message to the youngest BuildLog that is alive."""
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.WARNING,
        trt.ILogger.ERROR: logging.WARNING,
        trt.ILogger.WARNING: logging.WARNING,
        trt.ILogger.INFO: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.logs: list[weakref.ref[BuildLog]] = []

        def log(self, severity: Any, message: str) -> None:
            alive = [log for reference in self.logs if (log := reference()) is not None]
            if alive:
                alive[-1].write(levels.get(severity), message)

    return Logger()
