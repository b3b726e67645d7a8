"""The perf_analyzer that runs on this host, fetched by name and unpacked into the cache.

    glibc >= 2.38    the `perf-analyzer` wheel
    older            the binary inside `tritonclient` 2.51.0, the last release whose binary starts there, with the two
                     libraries it needs: libcudart (the `nvidia-cuda-runtime-cu12` wheel) and libb64 (Debian: libb64-0d)

On an older host `pip install perf-analyzer` "succeeds" with an empty placeholder, so the choice is made by the host.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.server.tool_cache import (
    Wheel,
    assemble,
    default_cache_folder,
    download_wheel,
    missing_libraries,
    prepend,
)

WHEEL = Wheel("perf-analyzer", "2.60.0", ("23ef56b107ae9233e5cf09fbdf508dd9b936a52f1bae2f63f53c8117087b3f25",))
WHEEL_DIGEST = "bb9097f111b7205c6ce67977aff02fc6bbe3c523a2d403259db0702d53f277da"  # of the tree that it unpacks to
WHEEL_NEEDS_GLIBC = (2, 38)
CLIENT = Wheel("tritonclient", "2.51.0", ("c485bb0123bdf310f90bc8b03d3489b28df2ffed55b30c7eee0b795b48113d52",))
CUDA_RUNTIME = Wheel(
    "nvidia-cuda-runtime-cu12", "12.9.79", ("25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3",)
)
CLIENT_DIGEST = "71c110eea9e36c6417654a38f9a2775cfafd5188309e70c38d208197266fae16"  # of the tree that both unpack to
_LIBB64 = "libb64.so.0d"


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    """An executable perf_analyzer and where it comes from."""

    executable: Path
    libraries: tuple[Path, ...]
    origin: str

    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        for folder in self.libraries:
            prepend(environment, "LD_LIBRARY_PATH", folder)
        return environment


def find_perf_analyzer() -> PerfAnalyzer:
    """Raises EnvironmentMissingError when it cannot be had, or a library that it loads is missing."""
    cache = default_cache_folder()
    glibc = _glibc_version()
    host = f"glibc {glibc[0]}.{glibc[1]}"
    libraries: tuple[Path, ...] = ()
    if glibc >= WHEEL_NEEDS_GLIBC:
        root = cache / f"perf-analyzer-{WHEEL.version}"
        assemble(root, _fill_from_wheel, WHEEL_DIGEST)
        origin = f"perf-analyzer {WHEEL.version} ({host})"
    else:
        root = cache / f"perf-analyzer-{CLIENT.version}-of-tritonclient"
        assemble(root, _fill_from_client, CLIENT_DIGEST)
        origin = f"the binary of tritonclient {CLIENT.version} ({host}: perf-analyzer {WHEEL.version} needs 2.38)"
        libraries = (root / "lib",)
        if _LIBB64 in missing_libraries(root / "perf_analyzer", os.environ):
            assemble(cache / "libb64", _fetch_libb64, None)  # apt-get has checked who signed it
            libraries += (cache / "libb64",)
    found = PerfAnalyzer(root / "perf_analyzer", libraries, origin)
    missing = missing_libraries(found.executable, found.environment())
    if missing:
        raise EnvironmentMissingError(
            f"{found.executable} needs {', '.join(missing)}, which this machine lacks; install the packages that hold "
            "them (Debian: libb64-0d, libssl3, zlib1g)"
        )
    return found


def _glibc_version() -> tuple[int, int]:
    library, version = platform.libc_ver()
    if library != "glibc":
        raise EnvironmentMissingError(
            f"perf_analyzer needs glibc, found {library or 'another C library'}; use a Debian host"
        )
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def _fill_from_wheel(scratch: Path, contents: Path) -> None:
    wheel = download_wheel(WHEEL, scratch)
    _extract(wheel, "perf_analyzer/bin/perf_analyzer", contents / "perf_analyzer")


def _fill_from_client(scratch: Path, contents: Path) -> None:
    (contents / "lib").mkdir()
    wheel = download_wheel(CLIENT, scratch)
    _extract(wheel, f"tritonclient-{CLIENT.version}.data/data/bin/perf_analyzer", contents / "perf_analyzer")
    runtime = download_wheel(CUDA_RUNTIME, scratch)
    _extract(runtime, "nvidia/cuda_runtime/lib/libcudart.so.12", contents / "lib" / "libcudart.so.12")


def _extract(wheel: Path, name: str, destination: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        destination.write_bytes(archive.read(name))
    destination.chmod(0o755)


def _fetch_libb64(scratch: Path, contents: Path) -> None:
    """Unpack Debian's package without installing it; needs no root, only apt's package lists."""
    if shutil.which("apt-get") and shutil.which("dpkg"):
        subprocess.run(["apt-get", "download", "--quiet", "libb64-0d"], cwd=scratch, capture_output=True, check=False)
    for package in scratch.glob("libb64-0d_*.deb"):
        subprocess.run(["dpkg", "-x", package, scratch / "libb64"], check=True)
        (library,) = scratch.glob(f"libb64/usr/lib/*/{_LIBB64}")
        (contents / _LIBB64).write_bytes(library.read_bytes())
        return
    raise EnvironmentMissingError(f"perf_analyzer needs {_LIBB64}; install it with: apt-get install libb64-0d")
