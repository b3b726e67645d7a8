"""Compiled kernels of one operation: machine code for one or more GPU architectures (SM)
and what a launch needs to know.

A bundle is one file. Engines embed it, so that running an engine needs neither Triton nor a second file.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SUPPORTED_SMS = (80, 86, 89, 90, 100, 120)
# Shared memory that one block may have, in bytes (CUDA programming guide, technical specifications).
SHARED_BYTES_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
SCHEMA_VERSION = 1
_INDEX = "kernels.json"
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the same kernels make the same bytes


def kernel_sm(sm: int) -> int | None:
    """The architecture that kernels are compiled for so that they run on `sm`; None where there is none."""
    usable = [known for known in SUPPORTED_SMS if known == sm or (sm // 10 == 8 == known // 10 and known < sm)]
    return max(usable, default=None)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    name: str
    entry: str  # symbol in the cubin
    parameters: tuple[str, ...]  # in order, without constants
    num_hidden_pointers: int  # parameters behind them that Triton adds; unused: null
    num_warps: int
    shared_bytes: int  # dynamic shared memory
    cubin: bytes


@dataclass(frozen=True, slots=True)
class KernelBundle:
    operation: str
    attributes: Mapping[str, int | str]  # of the form that the kernels were compiled for
    compiler: str
    kernels: Mapping[int, tuple[CompiledKernel, ...]]  # by SM

    def for_device(self, major: int, minor: int) -> tuple[CompiledKernel, ...]:
        """Kernels that run on compute capability major.minor.

        Code for 8.x runs on every later 8.y; from 9.0 on it is specific to the architecture. Raises ValueError when
        there are none.
        """
        capability = 10 * major + minor
        usable = [sm for sm in self.kernels if sm == capability or (major == 8 and 80 <= sm <= capability)]
        if not usable:
            raise ValueError(
                f"{self.operation}: expected kernels for SM {capability}, found SM {sorted(self.kernels)}; compile "
                "them for this GPU with build_scripts/compile_plugins.py, or build the engine again on it"
            )
        return self.kernels[max(usable)]

    def to_bytes(self) -> bytes:
        index = {
            "schema_version": SCHEMA_VERSION,
            "operation": self.operation,
            "attributes": dict(self.attributes),
            "compiler": self.compiler,
            "kernels": {sm: [_without_code(kernel) for kernel in kernels] for sm, kernels in self.kernels.items()},
        }
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_entry(_INDEX), json.dumps(index, indent=1, sort_keys=True))
            for sm, kernels in sorted(self.kernels.items()):
                for kernel in kernels:
                    archive.writestr(_entry(_code_path(sm, kernel.name)), kernel.cubin)
        return target.getvalue()

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".partial")
        temporary.write_bytes(self.to_bytes())
        os.replace(temporary, path)


def read_bundle(path: Path) -> KernelBundle:
    """Raises ValueError when the file is no bundle of this version."""
    return bundle_from_bytes(path.read_bytes(), str(path))


def bundle_from_bytes(data: bytes, where: str) -> KernelBundle:
    """Raises ValueError, naming `where`, when the data is no bundle of this version."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            index = json.loads(archive.read(_INDEX))
            if index["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"version {index['schema_version']}")
            kernels = {
                int(sm): tuple(_with_code(fields, archive.read(_code_path(sm, fields["name"]))) for fields in listed)
                for sm, listed in index["kernels"].items()
            }
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(
            f"{where}: expected compiled kernels of version {SCHEMA_VERSION}, found {error}; compile them again"
        ) from error
    return KernelBundle(index["operation"], index["attributes"], index["compiler"], kernels)


def _without_code(kernel: CompiledKernel) -> dict[str, Any]:
    return {name: value for name, value in asdict(kernel).items() if name != "cubin"}


def _with_code(fields: Mapping[str, Any], cubin: bytes) -> CompiledKernel:
    return CompiledKernel(**{**fields, "parameters": tuple(fields["parameters"])}, cubin=cubin)


def _code_path(sm: int | str, name: str) -> str:
    return f"sm_{sm}/{name}.cubin"


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _TIMESTAMP)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry
