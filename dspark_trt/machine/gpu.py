"""The GPU that this process would use: found through the CUDA driver, without importing torch or TensorRT.

A process has one GPU, CUDA's device 0; CUDA_VISIBLE_DEVICES chooses another.
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GPU_FIX = "use a machine with an NVIDIA GPU and its driver; a container has to be started with --gpus all"
_DEVICES = Path("/proc/driver/nvidia/gpus")
_MODULE_VERSION = Path("/sys/module/nvidia/version")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str  # as the driver gives it, e.g. "NVIDIA H200"
    sm: int  # compute capability: 10 * major + minor, e.g. 90
    memory_bytes: int
    driver: str  # e.g. "580.65.06, CUDA 13.0"

    def __str__(self) -> str:
        return f"{self.name} (SM {self.sm})"


@dataclass(frozen=True, slots=True)
class NoGpu:
    """Why there is none, and what to do about it."""

    reason: str
    fix: str
    has_driver: bool = False  # there is a GPU all the same, which stays unused

    def __str__(self) -> str:
        return f"no GPU ({self.reason})"


def look_for_gpu() -> Gpu | NoGpu:
    """CUDA's device 0, or what is missing: the package cuda-bindings, the driver, or a device."""
    try:
        from cuda.bindings import driver
    except ImportError:
        reason = "the package cuda-bindings, which asks the driver, is not installed"
        return NoGpu(reason, "pip install cuda-bindings", has_driver=has_driver())
    try:
        initialised = driver.cuInit(0)
    except RuntimeError as error:  # libcuda.so.1 cannot be opened
        return NoGpu(f"no NVIDIA driver: {error}", _GPU_FIX)
    try:
        _checked(driver, initialised)
        num_devices = _checked(driver, driver.cuDeviceGetCount())
        if num_devices == 0:
            raise RuntimeError("that it has no device")
        device = _checked(driver, driver.cuDeviceGet(0))
        kind = driver.CUdevice_attribute
        major, minor = (
            _checked(driver, driver.cuDeviceGetAttribute(attribute, device))
            for attribute in (
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        name = _checked(driver, driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
        memory_bytes = int(_checked(driver, driver.cuDeviceTotalMem(device)))
        cuda = int(_checked(driver, driver.cuDriverGetVersion()))
    except RuntimeError as error:
        return NoGpu(f"the NVIDIA driver says {error}", _GPU_FIX)
    return Gpu(name, 10 * major + minor, memory_bytes, _driver_version(cuda))


def has_driver() -> bool:
    """Whether there are a driver and a device, found without any package."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value > 0
    except (OSError, AttributeError):  # no such library, or another one of this name
        pass
    return any(_DEVICES.glob("*")) or shutil.which("nvidia-smi") is not None


def _driver_version(cuda: int) -> str:
    """`cuda` is 1000 * major + 10 * minor of the newest CUDA version that the driver supports."""
    supported = f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    try:
        return f"{_MODULE_VERSION.read_text().strip()}, {supported}"
    except OSError:  # not shown in every container
        return supported


def _checked(driver: Any, result: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises RuntimeError with CUDA's own words."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"{status.name}: {text.decode() if text else 'unknown error'}")
    return values[0] if values else None
