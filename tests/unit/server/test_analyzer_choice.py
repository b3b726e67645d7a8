"""Which perf_analyzer a host gets: decided by its C library, said aloud, refused with the line to install."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.server import perf_analyzer
from dspark_trt.server.tool_cache import Wheel, assemble

WHEELS = {
    "perf-analyzer": {"perf_analyzer/bin/perf_analyzer": b"of the wheel"},
    "tritonclient": {"tritonclient-2.51.0.data/data/bin/perf_analyzer": b"of the client"},
    "nvidia-cuda-runtime-cu12": {"nvidia/cuda_runtime/lib/libcudart.so.12": b"cudart"},
}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A host whose registry has the three wheels, whose cache is empty and which lacks no library."""

    def download(wheel: Wheel, folder: Path) -> Path:
        path = folder / f"{wheel.package}-{wheel.version}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in WHEELS[wheel.package].items():
                archive.writestr(name, content)
        return path

    monkeypatch.setattr(perf_analyzer, "default_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(perf_analyzer, "download_wheel", download)
    monkeypatch.setattr(perf_analyzer, "assemble", lambda folder, fill, digest: assemble(folder, fill, None))
    monkeypatch.setattr(perf_analyzer, "missing_libraries", lambda binary, environment: [])
    return monkeypatch


@pytest.mark.parametrize(
    ("glibc", "content", "libraries", "origin"),
    [
        ("2.36", b"of the client", ["libcudart.so.12"], "the binary of tritonclient 2.51.0 (glibc 2.36"),
        ("2.38", b"of the wheel", [], "perf-analyzer 2.60.0 (glibc 2.38)"),
        ("2.41", b"of the wheel", [], "perf-analyzer 2.60.0 (glibc 2.41)"),
    ],
)
def test_binary_is_chosen_by_the_c_library(
    host: pytest.MonkeyPatch, glibc: str, content: bytes, libraries: list[str], origin: str
) -> None:
    host.setattr(perf_analyzer.platform, "libc_ver", lambda: ("glibc", glibc))
    found = perf_analyzer.find_perf_analyzer()
    assert found.executable.read_bytes() == content
    assert found.executable.stat().st_mode & 0o111
    assert [path.name for folder in found.libraries for path in folder.iterdir()] == libraries
    assert found.origin.startswith(origin)
    search = found.environment().get("LD_LIBRARY_PATH", "").split(":")
    assert search[: len(found.libraries)] == [str(folder) for folder in found.libraries]


def test_missing_library_names_the_packages(host: pytest.MonkeyPatch) -> None:
    host.setattr(perf_analyzer.platform, "libc_ver", lambda: ("glibc", "2.38"))
    host.setattr(perf_analyzer, "missing_libraries", lambda binary, environment: ["libssl.so.3"])
    with pytest.raises(EnvironmentMissingError, match=r"needs libssl\.so\.3, which this machine lacks; install"):
        perf_analyzer.find_perf_analyzer()


def test_host_without_glibc_is_told_so(host: pytest.MonkeyPatch) -> None:
    host.setattr(perf_analyzer.platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(EnvironmentMissingError, match="perf_analyzer needs glibc"):
        perf_analyzer.find_perf_analyzer()
