"""`build` for GPUs through the command line: what a user reads and the exit code, on machines with and without a GPU.

The GPU is the recording driver's; TensorRT-RTX and the kernels' compiler are real. Nothing is executed on a GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_trt.building.manifest import read_manifest
from dspark_trt.commands.inspect import inspect_build
from dspark_trt.engines.settings import EngineSettings, GpuIdentity
from tests.support.cuda_driver.build import build_driver, open_first
from tests.support.factories import write_drafter, write_target

LIMITS = ["--max-requests", "2", "--max-seq-len", "64", "--max-batch-tokens", "32"]
NO_TENSORRT = "import sys; sys.modules['tensorrt'] = None; "


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", vocab_size=320, head_dim=16, tokenizer=True)
    drafter = write_drafter(folder / "drafter", target)
    return ["--target", str(target), "--drafter", str(drafter), *LIMITS]


class Machine:
    """Runs the command on a machine with the given GPU, or with none."""

    def __init__(self, driver: Path) -> None:
        self._driver = driver

    def run(self, *arguments: str, gpu: str | None, before: str = "") -> subprocess.CompletedProcess[str]:
        """`gpu`: name and SM, "NVIDIA L40S, 89"."""
        name, _, sm = (gpu or "none, 0").partition(", ")
        played = {"DRIVER_NUM_GPUS": "1" if gpu else "0", "DRIVER_GPU_NAME": name, "DRIVER_GPU_SM": sm}
        code = f"{open_first(self._driver)}{before}import sys; sys.argv = ['dspark-trt', *{list(arguments)!r}]; "
        command = [sys.executable, "-c", code + "from dspark_trt.cli import main; main()"]
        return subprocess.run(command, env=os.environ | played, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def machine(driver: Path) -> Machine:
    return Machine(driver)


@pytest.mark.parametrize(
    ("gpu", "options", "messages"),
    [
        (None, ["--backend", "tensorrt"], ["no CUDA-capable device", "Also: ", 'pip install "tensorrt>=11.1"']),
        (None, ["--backend", "tensorrt_rtx"], ["--backend onnxruntime", "--backend tensorrt_rtx --compute-capability"]),
        (None, ["--precision", "bf16"], ["precision bf16 is for the backends tensorrt and tensorrt_rtx"]),
        ("NVIDIA H200, 90", ["--backend", "tensorrt"], ['pip install "tensorrt>=11.1"']),
        ("NVIDIA H200, 90", ["--backend", "tensorrt_rtx"], ["no code for SM 90 (H100, H200)", "--backend tensorrt"]),
        ("NVIDIA L40S, 89", ["--backend", "tensorrt_rtx"], ["torch", "without CUDA", "a build for CUDA"]),
    ],
)
def test_what_is_missing_is_exit_code_3_and_one_line_before_anything_is_made(
    machine: Machine, pair: list[str], tmp_path: Path, gpu: str | None, options: list[str], messages: list[str]
) -> None:
    without_cuda = "from dspark_trt.machine import packages; packages.torch_versions = lambda: ('2.13.0+cpu', None); "
    result = machine.run(
        "build", *pair, "--output", str(tmp_path / "out"), *options, gpu=gpu, before=NO_TENSORRT + without_cuda
    )
    assert result.returncode == 3, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert [message for message in messages if message not in result.stderr] == []
    assert not (tmp_path / "out").exists()


def test_package_that_is_too_old_is_exit_code_3(machine: Machine, pair: list[str], tmp_path: Path) -> None:
    old = "import sys, types; sys.modules['tensorrt'] = types.SimpleNamespace(__version__='10.14.1.48'); "
    options = ["build", *pair, "--output", str(tmp_path / "out"), "--backend", "tensorrt"]
    result = machine.run(*options, gpu="NVIDIA H200, 90", before=old)
    assert result.returncode == 3
    assert "needs the package tensorrt 11.1 or later" in result.stderr
    assert "10.14.1.48" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--backend", "onnxruntime", "--precision", "fp16"],
        ["--backend", "tensorrt", "--precision", "int8"],
        ["--backend", "onnxruntime", "--compute-capability", "89"],
        ["--backend", "tensorrt_rtx", "--compute-capability", "8.9"],
        ["--backend", "tensorrt_rtx", "--compute-capability", "90"],
        ["--backend", "tensorrt_rtx", "--compute-capability", "-1"],
    ],
)
def test_options_that_do_not_go_together_are_exit_code_2(
    machine: Machine, pair: list[str], tmp_path: Path, options: list[str]
) -> None:
    result = machine.run("build", *pair, "--output", str(tmp_path / "out"), *options, gpu=None)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def ahead(machine: Machine, pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An ahead-of-time build on a machine without a GPU: its directory, and what it said."""
    output = tmp_path_factory.mktemp("ahead") / "out"
    result = machine.run("build", *pair, *ahead_of_time(output), gpu=None)
    assert result.returncode == 3, result.stderr
    return output, result.stderr


def ahead_of_time(output: Path) -> list[str]:
    return ["--output", str(output), "--backend", "tensorrt_rtx", "--compute-capability", "89"]


def test_ahead_of_time_build_ends_at_the_step_table_and_says_how_to_go_on(ahead: tuple[Path, str]) -> None:
    output, said = ahead
    error = said.splitlines()[-1]
    assert error.startswith(f"error: {output} has checkpoints, graphs and engines for GPUs of SM 89 now")
    assert "Run the same command there" in error
    made = sorted(path.name for path in output.iterdir() if path.is_dir())
    assert made == ["checkpoints", "engines", "graphs"]
    engines = {path.stem for path in (output / "engines").glob("*.engine")}
    assert engines == {"target", "drafter_ingest", "drafter_draft", "prefix_select"}
    settings = EngineSettings.model_validate_json((output / "engines" / "engine.json").read_text())
    assert (settings.backend, settings.sms, settings.gpu) == ("tensorrt_rtx", (89,), None)
    assert re.fullmatch(r"1\.7\..*", settings.library_version or "")
    versions = read_manifest(output / "engines").versions
    assert {"tensorrt-rtx-cu13", "triton"} <= set(versions)


def test_engines_made_ahead_of_time_are_kept_on_this_and_on_other_machines(
    machine: Machine, pair: list[str], ahead: tuple[Path, str], tmp_path: Path
) -> None:
    """Neither the place of the directory nor the GPU of the machine is a part of what decides them."""
    output = shutil.copytree(ahead[0], tmp_path / "copy")
    before = (output / "engines" / "manifest.json").stat().st_mtime_ns
    for gpu, message in ((None, "here is no GPU"), ("NVIDIA H200, 90", "here is NVIDIA H200 (SM 90)")):
        result = machine.run("-v", "build", *pair, *ahead_of_time(output), gpu=gpu)
        assert result.returncode == 3, result.stderr
        assert [f"{stage}: kept" in result.stderr for stage in ("checkpoints", "graphs", "engines")] == [True] * 3
        assert message in result.stderr
    assert (output / "engines" / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("command", [["inspect"], ["generate", "--prompt", "x"]], ids=["inspect", "generate"])
def test_what_was_made_ahead_of_time_is_told_with_what_is_left_to_do(
    machine: Machine, ahead: tuple[Path, str], command: list[str]
) -> None:
    result = machine.run(command[0], str(ahead[0]), *command[1:], gpu=None)
    assert result.returncode == 4
    assert result.stderr.startswith(f"error: {ahead[0]} is not a finished build")
    assert "found checkpoints, graphs, engines (for GPUs of SM 89); run the same" in result.stderr
    assert "on the machine that will serve" in result.stderr


def test_other_architectures_are_other_engines(machine: Machine, pair: list[str], ahead: tuple[Path, str]) -> None:
    result = machine.run("-v", "build", *pair, *ahead_of_time(ahead[0]), "--compute-capability", "120", gpu=None)
    assert result.returncode == 3, result.stderr
    assert "graphs: kept" in result.stderr
    assert "engines: building" in result.stderr
    settings = json.loads((ahead[0] / "engines" / "engine.json").read_text())
    assert settings["sms"] == [89, 120]


def test_operations_page_quotes_what_is_said(
    machine: Machine, pair: list[str], ahead: tuple[Path, str], tmp_path: Path
) -> None:
    page = " ".join((Path(__file__).parents[3] / "docs" / "operations.md").read_text().split())
    said = {ahead[0]: ahead[1].splitlines()[-1]}
    for backend in ("tensorrt", "tensorrt_rtx"):
        output = tmp_path / backend
        options = ["--output", str(output), "--backend", backend]
        said[output] = machine.run("build", *pair, *options, gpu=None, before=NO_TENSORRT).stderr
    here = "the NVIDIA driver says CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"
    for output, message in said.items():
        assert here in message
        without_driver = message.replace(here, "no NVIDIA driver: Failed to dlopen libcuda.so.1")
        assert without_driver.replace(str(output), "DIR").strip() in page


@pytest.fixture(scope="module")
def for_h200(machine: Machine, pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished build whose engine.json says that it is for an H200."""
    output = tmp_path_factory.mktemp("h200") / "out"
    result = machine.run("build", *pair, "--output", str(output), gpu=None)
    assert result.returncode == 0, result.stderr
    gpu = GpuIdentity(name="NVIDIA H200", sm=90)
    settings = EngineSettings(backend="tensorrt", library_version="11.1.0.106", sms=(90,), gpu=gpu)
    (output / "engines" / "engine.json").write_text(settings.model_dump_json())
    return output


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "x"]], ids=["serve", "generate"])
@pytest.mark.parametrize(
    ("gpu", "found"), [("NVIDIA L40S, 89", "NVIDIA L40S (SM 89)"), (None, "no GPU (the NVIDIA driver says")]
)
def test_serving_on_another_gpu_is_exit_code_3_and_says_which_it_is_for(
    machine: Machine, for_h200: Path, command: list[str], gpu: str | None, found: str
) -> None:
    result = machine.run(command[0], str(for_h200), *command[1:], gpu=gpu)
    assert result.returncode == 3, result.stderr
    expected = f"error: {for_h200} holds engines for NVIDIA H200 (SM 90), found {found}"
    assert result.stderr.startswith(expected)
    assert "dspark-trt build" in result.stderr
    assert result.stderr.count("\n") == 1


def test_inspect_tells_what_a_cpu_build_is_for(machine: Machine, pair: list[str], tmp_path: Path) -> None:
    result = machine.run("build", *pair, "--output", str(tmp_path / "out"), gpu=None)
    assert result.returncode == 0, result.stderr
    assert inspect_build(tmp_path / "out")["device"] == "CPU"


@pytest.mark.parametrize("gpu", ["NVIDIA L40S, 89", "NVIDIA H200, 90", None])
def test_doctor_tells_the_gpu_and_what_would_build_for_it(machine: Machine, gpu: str | None) -> None:
    result = machine.run("doctor", "--json", gpu=gpu, before=NO_TENSORRT)
    assert result.returncode == 0, result.stderr
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings["tensorrt"]["status"] == "optional"
    assert "tensorrt>=11.1" in findings["tensorrt"]["fix"]
    if gpu is None:
        assert findings["GPU"]["status"] == "optional"
        assert "no CUDA-capable device" in findings["GPU"]["found"]
    else:
        assert findings["GPU"]["found"].startswith(gpu.replace(", ", " (SM ") + "), 52 GB memory, driver ")
    assert findings["tensorrt_rtx"]["status"] == ("optional" if gpu == "NVIDIA H200, 90" else "ok")
