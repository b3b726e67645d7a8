"""Compiles the recording driver, and lets a command meet it in the place of the real one."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("driver.c")


def build_driver(folder: Path) -> Path:
    """The library; a process that opens it before cuda-bindings has this driver, by its SONAME."""
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


def open_first(library: Path) -> str:
    """Python code, one statement behind the other, that makes `library` this process's driver."""
    return f"import ctypes; ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL); "
