"""Engines of a GPU are opened on that GPU only, and what is found instead is said before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark_trt.engines import open as registry
from dspark_trt.engines.open import check_device, open_engines
from dspark_trt.engines.settings import EngineSettings, GpuIdentity
from dspark_trt.errors import EnvironmentMissingError, ManifestError
from dspark_trt.machine.gpu import Gpu, NoGpu
from dspark_trt.server.serve import ServeOptions, serve

H200 = Gpu("NVIDIA H200", 90, 1, "CUDA 13.0")
L40S = Gpu("NVIDIA L40S", 89, 1, "CUDA 13.0")
RTX_6000 = Gpu("NVIDIA RTX 6000 Ada Generation", 89, 1, "CUDA 13.0")
NOTHING = NoGpu("no NVIDIA driver: none", "use a GPU host")
FULL = EngineSettings(
    backend="tensorrt", library_version="11.1.0.106", sms=(90,), gpu=GpuIdentity(name=H200.name, sm=H200.sm)
)
RTX = EngineSettings(backend="tensorrt_rtx", library_version="1.0.0.1", sms=(80, 89))
CPU = EngineSettings(backend="onnxruntime")


@pytest.fixture
def build_dir(tmp_path: Path) -> Path:
    (tmp_path / "engines").mkdir()
    return tmp_path


def put(build_dir: Path, settings: EngineSettings) -> None:
    (build_dir / "engines" / "engine.json").write_text(settings.model_dump_json())


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def play(gpu: Gpu | NoGpu, *, lacks: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(registry, "look_for_gpu", lambda: gpu)
        monkeypatch.setattr(registry, "device_runtime_lacks", lambda: iter(lacks))

    return play


@pytest.mark.parametrize(
    ("settings", "gpu"),
    [(FULL, H200), (RTX, L40S), (RTX, RTX_6000), (RTX, Gpu("NVIDIA A100", 80, 1, "")), (CPU, NOTHING), (CPU, H200)],
)
def test_engines_run_where_they_were_built_for(use: Any, build_dir: Path, settings: EngineSettings, gpu: Gpu) -> None:
    use(gpu)
    put(build_dir, settings)
    check_device(build_dir)


@pytest.mark.parametrize(
    ("settings", "gpu", "message"),
    [
        (FULL, L40S, r"holds engines for NVIDIA H200 \(SM 90\), found NVIDIA L40S \(SM 89\); .*dspark-trt build"),
        (FULL, Gpu("NVIDIA H100 80GB HBM3", 90, 1, ""), r"for NVIDIA H200 \(SM 90\), found NVIDIA H100 80GB HBM3"),
        (FULL, NOTHING, r"for NVIDIA H200 \(SM 90\), found no GPU \(no NVIDIA driver: none\)"),
        (RTX, H200, r"for GPUs of SM 80, 89, found NVIDIA H200 \(SM 90\)"),
        (RTX, Gpu("NVIDIA A40", 86, 1, ""), r"for GPUs of SM 80, 89, found NVIDIA A40 \(SM 86\)"),
    ],
)
def test_another_gpu_or_none_is_refused_before_anything_is_opened(
    use: Any, build_dir: Path, settings: EngineSettings, gpu: Gpu | NoGpu, message: str
) -> None:
    use(gpu)
    put(build_dir, settings)
    with pytest.raises(EnvironmentMissingError, match=message):
        open_engines(build_dir)
    with pytest.raises(EnvironmentMissingError, match=message):
        serve(build_dir, ServeOptions())


def test_gpu_engines_without_torch_for_cuda_are_refused(use: Any, build_dir: Path) -> None:
    use(L40S, lacks=("torch is not installed (get it)",))
    put(build_dir, RTX)
    with pytest.raises(EnvironmentMissingError, match=r"GPUs of SM 80, 89: torch is not installed \(get it\)"):
        check_device(build_dir)


def test_engines_of_another_version_of_the_package_are_refused(use: Any, build_dir: Path) -> None:
    use(L40S)
    put(build_dir, RTX)
    with pytest.raises(EnvironmentMissingError, match=r"engines of tensorrt_rtx 1\.0\.0\.1, .* found 1\.7"):
        open_engines(build_dir)


@pytest.mark.parametrize(("content", "message"), [(None, "not a finished build"), ("{", "cannot be read")])
def test_build_without_readable_settings_is_refused(build_dir: Path, content: str | None, message: str) -> None:
    if content is not None:
        (build_dir / "engines" / "engine.json").write_text(content)
    with pytest.raises(ManifestError, match=message):
        check_device(build_dir)
