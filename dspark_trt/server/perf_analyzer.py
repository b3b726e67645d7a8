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
from dspark_trt.server.tool_cache import assemble, default_cache_folder, download_wheel, missing_libraries, prepend

WHEEL_VERSION = "2.60.0"
WHEEL_NEEDS_GLIBC = (2, 38)
CLIENT_VERSION = "2.51.0"
CUDA_RUNTIME_VERSION = "12.9.79"
_LIBB64 = "libb64.so.0d"


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    """An executable perf_analyzer and where it comes from."""

    executable: Path
    libraries: Path
    origin: str

    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        prepend(environment, "LD_LIBRARY_PATH", self.libraries)
        return environment


def find_perf_analyzer(cache: Path | None = None) -> PerfAnalyzer:
    """Raises EnvironmentMissingError when it cannot be had, or a library that it loads is missing."""
    cache = cache or default_cache_folder()
    glibc = _glibc_version()
    host = f"glibc {glibc[0]}.{glibc[1]}"
    if glibc >= WHEEL_NEEDS_GLIBC:
        root = cache / f"perf-analyzer-{WHEEL_VERSION}"
        assemble(root, _fill_from_wheel)
        origin = f"perf-analyzer {WHEEL_VERSION} ({host})"
    else:
        root = cache / f"perf-analyzer-of-tritonclient-{CLIENT_VERSION}"
        assemble(root, _fill_from_client)
        origin = f"the binary of tritonclient {CLIENT_VERSION} ({host}: perf-analyzer {WHEEL_VERSION} needs 2.38)"
    found = PerfAnalyzer(root / "perf_analyzer", root / "lib", origin)
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
    (contents / "lib").mkdir()
    wheel = download_wheel("perf-analyzer", WHEEL_VERSION, scratch)
    _extract(wheel, "perf_analyzer/bin/perf_analyzer", contents / "perf_analyzer")


def _fill_from_client(scratch: Path, contents: Path) -> None:
    (contents / "lib").mkdir()
    wheel = download_wheel("tritonclient", CLIENT_VERSION, scratch)
    _extract(wheel, f"tritonclient-{CLIENT_VERSION}.data/data/bin/perf_analyzer", contents / "perf_analyzer")
    runtime = download_wheel("nvidia-cuda-runtime-cu12", CUDA_RUNTIME_VERSION, scratch)
    _extract(runtime, "nvidia/cuda_runtime/lib/libcudart.so.12", contents / "lib" / "libcudart.so.12")
    if _LIBB64 in missing_libraries(contents / "perf_analyzer", os.environ):
        _fetch_libb64(scratch, contents / "lib")


def _extract(wheel: Path, name: str, destination: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        destination.write_bytes(archive.read(name))
    destination.chmod(0o755)


def _fetch_libb64(scratch: Path, libraries: Path) -> None:
    """Unpack Debian's package without installing it; needs no root, only apt's package lists."""
    if shutil.which("apt-get") and shutil.which("dpkg"):
        subprocess.run(["apt-get", "download", "--quiet", "libb64-0d"], cwd=scratch, capture_output=True, check=False)
    for package in scratch.glob("libb64-0d_*.deb"):
        subprocess.run(["dpkg", "-x", package, scratch / "libb64"], check=True)
        (library,) = scratch.glob(f"libb64/usr/lib/*/{_LIBB64}")
        (libraries / _LIBB64).write_bytes(library.read_bytes())
        return
    raise EnvironmentMissingError(f"perf_analyzer needs {_LIBB64}; install it with: apt-get install libb64-0d")
