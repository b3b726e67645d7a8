"""The GPU of a process, asked of the recording driver through the real cuda-bindings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cuda_driver.build import build_driver, open_first

ASK = (
    "from dspark_trt.machine.gpu import look_for_gpu; found = look_for_gpu(); "
    "print(found); print(type(found).__name__); "
)
LOADED = "import sys; print([name for name in ('torch', 'tensorrt', 'tensorrt_rtx') if name in sys.modules])"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


def ask(code: str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def test_name_architecture_memory_and_driver_are_the_drivers(driver: Path) -> None:
    code = open_first(driver) + "from dspark_trt.machine.gpu import look_for_gpu; print(repr(look_for_gpu()))"
    (found,) = ask(code, DRIVER_GPU_NAME="NVIDIA L40S", DRIVER_GPU_SM="89")
    assert found.startswith(f"Gpu(name='NVIDIA L40S', sm=89, memory_bytes={48 << 30}, driver=")
    assert "CUDA 13.0" in found


@pytest.mark.parametrize("sm", ["90", "120"])
def test_compute_capabilities_of_two_and_of_three_digits(driver: Path, sm: str) -> None:
    assert ask(open_first(driver) + ASK, DRIVER_GPU_SM=sm)[0] == f"NVIDIA H200 (SM {sm})"


def test_driver_without_a_device_says_so(driver: Path) -> None:
    said, found = ask(open_first(driver) + ASK, DRIVER_NUM_GPUS="0")
    assert said == "no GPU (the NVIDIA driver says CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected)"
    assert found == "NoGpu"


def test_machine_without_a_driver_says_so(tmp_path: Path) -> None:
    """A library of the driver's name that is none: what dlopen finds first, on a GPU host too."""
    (tmp_path / "libcuda.so.1").write_text("")
    said, found = ask(ASK, LD_LIBRARY_PATH=str(tmp_path))
    assert said.startswith("no GPU (no NVIDIA driver: ")
    assert found == "NoGpu"


def test_missing_package_is_named() -> None:
    said, found = ask("import sys; sys.modules['cuda.bindings'] = None; " + ASK)
    assert said == "no GPU (the package cuda-bindings, which asks the driver, is not installed)"
    assert found == "NoGpu"


def test_looking_loads_neither_torch_nor_tensorrt(driver: Path) -> None:
    assert ask(open_first(driver) + ASK + LOADED)[-1] == "[]"
