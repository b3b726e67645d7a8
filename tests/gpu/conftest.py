"""These tests are collected where torch sees a CUDA GPU, and nowhere else.

With DSPARK_REQUIRE_GPU=1 a machine without one is an error: on a GPU host nothing may be left out unnoticed. TensorRT
alike: DSPARK_REQUIRE_TENSORRT=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import pytest
from dspark_trt_plugins.bundle import KernelBundle
from dspark_trt_plugins.operation import Operation


def has_gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def has_tensorrt() -> bool:
    return find_spec("tensorrt") is not None or find_spec("tensorrt_rtx") is not None


collect_ignore_glob = []
if not has_gpu():
    if os.environ.get("DSPARK_REQUIRE_GPU") == "1":
        raise pytest.UsageError("DSPARK_REQUIRE_GPU=1, and torch sees no CUDA GPU")
    collect_ignore_glob.append("test_*.py")
if not has_tensorrt():
    if os.environ.get("DSPARK_REQUIRE_TENSORRT") == "1":
        raise pytest.UsageError("DSPARK_REQUIRE_TENSORRT=1, and neither tensorrt nor tensorrt_rtx is installed")
    collect_ignore_glob += ["test_*_in_tensorrt.py", "test_tensorrt_*.py"]


def compile_here(operation: Operation, sm: int) -> KernelBundle:
    os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported
    from dspark_trt_plugins.compile import compile_operation

    return compile_operation(operation, [sm])


class Compiler:
    """Compiles operations for this GPU, in processes of their own: many at once."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        import torch

        major, minor = torch.cuda.get_device_capability()
        self._sm = 10 * major + minor
        self._pool = pool
        self._bundles: dict[Operation, Future[KernelBundle]] = {}

    def start(self, operation: Operation) -> None:
        if operation not in self._bundles:
            self._bundles[operation] = self._pool.submit(compile_here, operation, self._sm)

    def __call__(self, operation: Operation) -> KernelBundle:
        self.start(operation)
        return self._bundles[operation].result()


@pytest.fixture(scope="session")
def compile_for_gpu() -> Iterator[Compiler]:
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        yield Compiler(pool)


@pytest.fixture(autouse=True)
def _full_float32() -> Iterator[None]:
    """No TF32 where float32 is compared."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
