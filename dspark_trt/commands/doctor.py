"""`dspark-trt doctor`: what this machine can do and what is missing, found without importing any engine."""

from __future__ import annotations

import ctypes.util
import platform
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

import typer

from dspark_trt.commands.options import AsJson, command
from dspark_trt.engines.tensorrt.library import LIBRARIES, Library, usable_sms
from dspark_trt.errors import EXIT_ENVIRONMENT_MISSING, EXIT_OK, EnvironmentMissingError
from dspark_trt.machine import cpu
from dspark_trt.machine.gpu import Gpu, NoGpu, look_for_gpu
from dspark_trt.machine.packages import (
    DEVICE_DISTRIBUTIONS,
    TORCH_FIX,
    TRITON_FIX,
    install_extra,
    installed_versions,
    torch_versions,
)
from dspark_trt.server.exposure import FIXED, installed_version, is_fixed
from dspark_trt.server.server_tree import LAST_PYTHON

Status = Literal["ok", "missing", "optional"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `missing` blocks building and generating;
    `optional` says what would be needed for more."""

    name: str
    status: Status
    found: str
    fix: str = ""


@command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can do and what is missing."""
    from dspark_trt.commands import report

    findings = examine()
    is_ready = can_build_and_generate(findings)
    if as_json:
        report.print_json({"ready": is_ready, "findings": [asdict(finding) for finding in findings]})
    else:
        report.print_findings(findings, is_ready)
    raise typer.Exit(EXIT_OK if is_ready else EXIT_ENVIRONMENT_MISSING)


def examine() -> list[Finding]:
    """All findings, machine first, then what building, generating and serving need."""
    accelerator = _accelerator()
    status = {finding.name: finding.status for finding in accelerator}
    has_device_engines = "ok" in (status["tensorrt"], status["tensorrt_rtx"]) and all(
        status[name] == "ok" for name in ("GPU", "torch for CUDA", "triton")
    )
    return [*_machine(), *_packages(has_device_engines), *_serving(), *accelerator]


def can_build_and_generate(findings: list[Finding]) -> bool:
    return all(finding.status != "missing" for finding in findings)


def _machine() -> list[Finding]:
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    gigabytes = cpu.memory_bytes() / 1e9
    return [
        Finding("cpu", "ok", f"{cpu.cpu_model()}, {cpu.num_cores()} cores, {gigabytes:.0f} GB memory"),
        Finding(
            "python",
            "ok" if supported else "missing",
            platform.python_version(),
            "" if supported else "use Python 3.11, 3.12 or 3.13",
        ),
    ]


def _package(distribution: str, need: Status, purpose: str, install: str) -> Finding:
    try:
        return Finding(distribution, "ok", metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return Finding(distribution, need, "not installed", f"{purpose}: {install}")


def _packages(has_device_engines: bool) -> list[Finding]:
    cpu_engine: Status = "optional" if has_device_engines else "missing"
    return [
        _package("onnx", "missing", "writes the graphs", "pip install onnx"),
        _package("onnxruntime", cpu_engine, "the engine of CPU hosts", install_extra("onnxruntime")),
        _package("tritonclient", "optional", "talks to a running server", install_extra("client")),
        _package("fastapi", "optional", "`serve --openai-port`", install_extra("openai")),
    ]


def _serving() -> list[Finding]:
    server = shutil.which("tritonserver")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    library = ctypes.util.find_library(f"python{version}")
    return [
        Finding(
            "tritonserver",
            "ok" if server else "optional",
            server or "not on PATH",
            "" if server else _how_to_get_a_server(),
        ),
        Finding(
            f"libpython{version}",
            "ok" if library else "optional",
            library or "not found",
            "" if library else f"Triton's Python backend needs it: apt-get install libpython{version}",
        ),
        Finding("glibc", "ok", platform.libc_ver()[1] or "not glibc"),
        _other_machines(),
    ]


def _other_machines() -> Finding:
    """Which doors of `serve --address` other machines may use."""
    name = "serving others"
    try:
        version = installed_version()
    except EnvironmentMissingError as error:
        return Finding(name, "optional", "tritonserver does not start", str(error))
    if is_fixed(version):
        return Finding(name, "ok", f"tritonserver {version}: --address holds for all its endpoints")
    return Finding(
        name,
        "optional",
        f"tritonserver {version} is kept on 127.0.0.1",
        f"--address needs --openai-port (above, fastapi), or a tritonserver of {FIXED} or later on PATH",
    )


def _how_to_get_a_server() -> str:
    if sys.version_info[:2] > LAST_PYTHON:
        return f"`dspark-trt serve` needs one, or Python {LAST_PYTHON[0]}.{LAST_PYTHON[1]} or older to assemble its own"
    return "`dspark-trt serve` assembles one from the nvidia-pytriton wheel on first use"


def _accelerator() -> list[Finding]:
    gpu = look_for_gpu()
    return [
        Finding("GPU", "ok", f"{gpu}, {gpu.memory_bytes / 1e9:.0f} GB memory, driver {gpu.driver}")
        if isinstance(gpu, Gpu)
        else Finding("GPU", "optional", gpu.reason, f"CPU engines only; for others {gpu.fix}"),
        *(_compiler(library, gpu) for library in LIBRARIES),
        _torch(),
        Finding("triton", "ok", metadata.version("triton"))
        if find_spec("triton")
        else Finding("triton", "optional", "not installed", f"compiles the plugins of GPU engines: {TRITON_FIX}"),
    ]


def _compiler(library: Library, gpu: Gpu | NoGpu) -> Finding:
    """`tensorrt` or `tensorrt_rtx`: its version, and whether it makes engines for the GPU here."""
    installed = installed_versions(*(name for name in DEVICE_DISTRIBUTIONS if _module_of(name) == library))
    version = next(iter(installed.values()), "installed, of unknown version")
    if find_spec(library) is None:
        purpose = f"engines for SM {', '.join(map(str, usable_sms(library)))}"
        return Finding(library, "optional", "not installed", f"{purpose}: {LIBRARIES[library].install}")
    if isinstance(gpu, Gpu) and gpu.sm not in usable_sms(library):
        return Finding(library, "optional", version, f"makes no engines for SM {gpu.sm}")
    return Finding(library, "ok", version)


def _module_of(distribution: str) -> str:
    """`tensorrt-rtx-cu13` installs the module `tensorrt_rtx`."""
    return re.sub(r"-cu\d+$", "", distribution).replace("-", "_")


def _torch() -> Finding:
    versions = torch_versions()
    found = "not installed" if versions is None else f"{versions[0]}, CUDA {versions[1] or 'none'}"
    is_for_cuda = versions is not None and versions[1] is not None
    return Finding(
        "torch for CUDA",
        "ok" if is_for_cuda else "optional",
        found,
        "" if is_for_cuda else f"runs engines on GPUs (a CPU host builds and serves without): {TORCH_FIX}",
    )
