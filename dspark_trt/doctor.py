"""`dspark-trt doctor`: what this machine can do and what is missing, found without importing any engine."""

from __future__ import annotations

import ctypes.util
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

from dspark_trt import host
from dspark_trt.serving.server_tree import LAST_PYTHON

Status = Literal["ok", "missing", "optional"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `missing` blocks the CPU path; `optional` says what would be needed for more."""

    name: str
    status: Status
    found: str
    fix: str = ""


def examine() -> list[Finding]:
    """All findings, machine first, then what building, generating and serving need."""
    return [*_machine(), *_packages(), *_serving(), *_accelerator()]


def can_build_and_generate(findings: list[Finding]) -> bool:
    return all(finding.status != "missing" for finding in findings)


def _machine() -> list[Finding]:
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    gigabytes = host.memory_bytes() / 1e9
    return [
        Finding("cpu", "ok", f"{host.cpu_model()}, {host.num_cores()} cores, {gigabytes:.0f} GB memory"),
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
        return Finding(distribution, need, "not installed", f"{purpose}: pip install '{install}'")


def _packages() -> list[Finding]:
    return [
        _package("onnx", "missing", "writes the graphs", "dspark-trt"),
        _package("onnxruntime", "missing", "the engine of CPU hosts", "dspark-trt[onnxruntime]"),
        _package("tritonclient", "optional", "talks to a running server", "dspark-trt[client]"),
        _package(
            "torch", "optional", "the reference engine of the tests; never needed to build or serve", "torch==2.13.0"
        ),
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
    ]


def _how_to_get_a_server() -> str:
    if sys.version_info[:2] > LAST_PYTHON:
        return f"`dspark-trt serve` needs one, or Python {LAST_PYTHON[0]}.{LAST_PYTHON[1]} or older to assemble its own"
    return "`dspark-trt serve` assembles one from the nvidia-pytriton wheel on first use"


def _accelerator() -> list[Finding]:
    driver = ctypes.util.find_library("cuda")
    compilers = [name for name in ("tensorrt", "tensorrt_rtx") if find_spec(name) is not None]
    return [
        Finding(
            "NVIDIA driver", "ok" if driver else "optional", driver or "none", "" if driver else "CPU engines only"
        ),
        Finding(
            "TensorRT",
            "ok" if compilers else "optional",
            ", ".join(compilers) or "not installed",
            "" if compilers else "TensorRT engines are not part of this version",
        ),
    ]
