"""Which backend is chosen, and what is refused before anything is built;
GPUs are played, packages are as installed or removed."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_trt.building import backends
from dspark_trt.building.backends import resolve_backend
from dspark_trt.building.recipe import BuildRecipe, load_recipe
from dspark_trt.errors import EnvironmentMissingError, RecipeError
from dspark_trt.machine.gpu import Gpu, NoGpu
from dspark_trt.machine.packages import device_runtime_lacks, torch_versions

H200 = Gpu("NVIDIA H200", 90, 150_000_000_000, "CUDA 13.0")
L40S = Gpu("NVIDIA L40S", 89, 48_000_000_000, "CUDA 13.0")
NOTHING = NoGpu("no NVIDIA driver: none", "use a GPU host")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with this GPU and these packages, torch for CUDA among them unless it is said not to be."""

    def be(gpu: Gpu | NoGpu, *, tensorrt: str | None = None, rtx: bool = True, torch_for_cuda: bool = True) -> None:
        monkeypatch.setattr(backends, "look_for_gpu", lambda: gpu)
        module = SimpleNamespace(__version__=tensorrt) if tensorrt else None
        monkeypatch.setitem(sys.modules, "tensorrt", module)
        if not rtx:
            monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
        lacks = () if torch_for_cuda else ("torch 2.13.0+cpu is built without CUDA",)
        monkeypatch.setattr(backends, "device_runtime_lacks", lambda: iter(lacks))

    return be


def recipe(**values: Any) -> BuildRecipe:
    return load_recipe(None, {"target": "t", "drafter": "d"} | values)


def resolved(**values: Any) -> tuple[str, str | None, tuple[int, ...]]:
    result = resolve_backend(recipe(**values))
    return result.backend, result.precision, result.compute_capabilities


def test_auto_takes_tensorrt_where_it_and_a_gpu_are_there(machine: Any) -> None:
    machine(H200, tensorrt="11.1.0.106")
    assert resolved() == ("tensorrt", "bf16", ())
    assert resolved(precision="fp16") == ("tensorrt", "fp16", ())


def test_auto_takes_tensorrt_rtx_on_a_card_that_it_compiles_for(machine: Any) -> None:
    machine(L40S)
    assert resolved() == ("tensorrt_rtx", "bf16", (89,))


@pytest.mark.parametrize(
    ("gpu", "packages", "reason"),
    [
        (NOTHING, {}, "no NVIDIA driver"),
        (H200, {}, r"needs the package tensorrt 11\.1 .*tensorrt_rtx has no code for SM 90"),
        (L40S, {"rtx": False}, "needs the package tensorrt_rtx"),
        (L40S, {"tensorrt": "10.14.1.48", "rtx": False}, r"found 10\.14\.1\.48"),
        (L40S, {"torch_for_cuda": False}, "built without CUDA"),
    ],
)
def test_auto_falls_back_to_the_cpu_and_says_why(
    machine: Any, gpu: Gpu | NoGpu, packages: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine(gpu, **packages)
    with caplog.at_level(logging.INFO, "dspark_trt"):
        assert resolved() == ("onnxruntime", "fp32", ())
    (record,) = [record for record in caplog.records if "found" in record.getMessage()]
    assert record.levelno == (logging.INFO if gpu is NOTHING else logging.WARNING)
    assert re.search(reason, record.getMessage())


def test_auto_leaves_a_gpu_alone_when_a_precision_of_the_cpu_is_asked_for(machine: Any) -> None:
    machine(H200, tensorrt="11.1.0.106")
    assert resolved(precision="int8") == ("onnxruntime", "int8", ())


def test_auto_does_not_build_another_precision_than_was_asked_for(machine: Any) -> None:
    machine(NOTHING)
    with pytest.raises(
        EnvironmentMissingError,
        match=r"precision bf16 is for .* use neither \(no GPU \(no NVIDIA driver.*--compute-capability",
    ):
        resolved(precision="bf16")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"backend": "onnxruntime", "precision": "bf16"},
            "expects fp32 or int8 or int4, found bf16: ONNX Runtime has no",
        ),
        ({"backend": "onnxruntime", "precision": "fp16"}, "use --backend tensorrt or --backend tensorrt_rtx"),
        ({"backend": "tensorrt", "precision": "fp32"}, "backend tensorrt expects bf16 or fp16, found fp32"),
        ({"backend": "tensorrt_rtx", "precision": "int4"}, "use --backend onnxruntime"),
        (
            {"backend": "tensorrt", "compute_capabilities": [90]},
            r"compute_capabilities: found \[90\] with backend tensorrt",
        ),
        ({"backend": "onnxruntime", "compute_capabilities": [89]}, "leave --compute-capability out"),
        ({"backend": "tensorrt", "num_threads": 2}, "num_threads: found 2 with backend tensorrt"),
    ],
)
def test_what_does_not_go_together_is_refused_whatever_the_machine(
    machine: Any, values: dict[str, Any], message: str
) -> None:
    machine(H200, tensorrt="11.1.0.106")
    with pytest.raises(RecipeError, match=message):
        resolved(**values)


@pytest.mark.parametrize(
    ("gpu", "packages", "values", "messages"),
    [
        (NOTHING, {}, {"backend": "tensorrt"}, ["no NVIDIA driver", "use a GPU host", "Also: ", "tensorrt>=11.1"]),
        (H200, {"tensorrt": "10.14.1.48"}, {"backend": "tensorrt"}, ["found 10.14.1.48", "tensorrt>=11.1"]),
        (H200, {"tensorrt": "11.1.0", "torch_for_cuda": False}, {"backend": "tensorrt"}, ["torch", "without CUDA"]),
        (H200, {}, {"backend": "tensorrt_rtx"}, ["no code for SM 90 (H100, H200)", "use --backend tensorrt"]),
        (NOTHING, {}, {"backend": "tensorrt_rtx"}, ["--backend onnxruntime", "--compute-capability"]),
        (L40S, {"rtx": False}, {"backend": "tensorrt_rtx"}, ["tensorrt_rtx", "pip install tensorrt-rtx-cu13=="]),
    ],
)
def test_what_this_machine_lacks_is_said_in_one_message(
    machine: Any, gpu: Gpu | NoGpu, packages: Any, values: dict[str, Any], messages: list[str]
) -> None:
    machine(gpu, **packages)
    with pytest.raises(EnvironmentMissingError) as caught:
        resolved(**values)
    assert [message for message in messages if message not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sms", "message"),
    [
        ([90], r"found \[90\]: tensorrt_rtx has no code for SM 90 \(H100, H200\); use --backend tensorrt$"),
        ([89, 100], r"found \[89, 100\]: tensorrt_rtx has no code for SM 100 \(B200\); use --backend tensorrt$"),
        (
            [75],
            r"kernels of the plugins have no code for SM 75 \(T4\): expected one of SM 80 86 89 120; use another GPU$",
        ),
        ([121], r"kernels of the plugins have no code for SM 121: expected one of SM 80 86 89 120; use another GPU$"),
        ([103], r"tensorrt_rtx has no code for SM 103 \(B300\): expected one of SM 80 86 89 120$"),  # nor has tensorrt
        ([12], r"tensorrt_rtx has no code for SM 12: expected one of SM 80 86 89 120$"),
        ([0], "no code for SM 0:"),
        ([-1], "no code for SM -1:"),
    ],
)
@pytest.mark.parametrize("gpu", [NOTHING, L40S], ids=["no GPU", "L40S"])
def test_architectures_that_no_machine_makes_code_for_are_an_error_of_the_user(
    machine: Any, gpu: Gpu | NoGpu, sms: list[int], message: str
) -> None:
    machine(gpu)
    with pytest.raises(RecipeError, match=message):
        resolved(backend="tensorrt_rtx", compute_capabilities=sms)


def test_missing_triton_is_named(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(L40S)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(EnvironmentMissingError, match="triton is not installed"):
        resolved(backend="tensorrt_rtx")


@pytest.mark.parametrize("gpu", [NOTHING, H200], ids=["no GPU", "another GPU"])
def test_compiling_ahead_of_time_needs_neither_a_gpu_nor_torch(machine: Any, gpu: Gpu | NoGpu) -> None:
    machine(gpu, torch_for_cuda=False)
    values = {"backend": "tensorrt_rtx", "compute_capabilities": [120, 89, 120]}
    assert resolved(**values) == ("tensorrt_rtx", "bf16", (89, 120))


@pytest.mark.parametrize(
    ("version", "cuda", "lack"),
    [("2.13.0", "'13.0'", None), ("2.13.0+cpu", "None", "torch 2.13.0+cpu is built without CUDA")],
)
def test_torch_is_told_apart_without_importing_it(
    version: str, cuda: str, lack: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda}\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    versions = torch_versions()
    assert versions is not None
    assert versions[0] == version
    lacks = list(device_runtime_lacks())
    assert (lacks == []) if lack is None else (lack in lacks[0])


def test_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert list(device_runtime_lacks()) == ["torch is not installed (pip install torch==2.13.0, a build for CUDA)"]
