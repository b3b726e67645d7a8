"""Everything that only a GPU host can show, in under 8 minutes, without downloads: a table, and a JSON report.

    build_scripts/gpu_check.sh [--output perf/results/gpu_check_h200.json] [--seconds 470]

Everything needs torch for CUDA, triton, cuda-bindings, pytest and onnx; some parts (P) the package's own dependencies,
some (T) tensorrt or tensorrt_rtx besides.

| part | what it shows | needs |
|---|---|---|
| kernels | MarkovHead and PrefixSelect against their references, in CUDA graphs, with poisoned surroundings | |
| attention kernels | the same of RowAttention, prompt chunks too, in every number of splits | |
| acceptance kernels | the same of Acceptance, and its time with Qwen3's defaults at 1 and 32 requests | |
| device sessions | the graphs in PyTorch with the compiled kernels: against the CPU, in CUDA graphs | P |
| device runtime | greedy identity, chi-square, CUDA graphs, a capture that fails, stream order, on PyTorch | P |
| plugin microbenchmark | all plugins against straightforward torch and against the byte floor | |
| device steps | a step table excerpt of the CUDA reference engine, eager against CUDA graphs | P |
| device costs | binding and capturing a new bucket, five scattered prompts, likely steps made beforehand | P |
| plugins in TensorRT | an engine with MarkovHead and PrefixSelect runs | T |
| TensorRT engines | a pair's engines against the reference: numbers, caches, mask, float16 sums, greedy identity | T |
| TensorRT steps | a step table excerpt of TensorRT engines | T |

A part that does not fit the time left is reported as such and fails the check. Exit status: 0 all that can run here
passed, 3 no GPU, 4 a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).parent.parent
TESTS = REPOSITORY / "tests" / "gpu"
DEFAULT_SECONDS = 470.0
RTX_WITHOUT_CODE = (90, 100, 103, 110)  # SMs that TensorRT-RTX does not target
# What the parts import, on a host with nothing else
KERNEL_MODULES = ("numpy", "torch", "triton", "cuda.bindings", "pytest", "ml_dtypes", "onnx")
RUNTIME_MODULES = (
    *(
        *KERNEL_MODULES,
        "array_api_compat",
        "gguf",
        "huggingface_hub",
        "jinja2",
        "pydantic",
        "safetensors",
        "tokenizers",
    ),
    "yaml",
)
VERSIONS = ("torch", "triton", "cuda-bindings", "numpy", "tensorrt", "tensorrt-rtx-cu13")


@dataclass(frozen=True, slots=True)
class Part:
    """One command: a test file, or a benchmark that writes JSON to the path appended to it."""

    name: str
    file: Path
    arguments: tuple[str, ...] = ()
    modules: tuple[str, ...] = RUNTIME_MODULES
    needs_tensorrt: bool = False

    @property
    def is_test(self) -> bool:
        return self.file.name.startswith("test_")


def _tensorrt() -> str:
    return "tensorrt" if find_spec("tensorrt") else "tensorrt_rtx"


PARTS = (
    Part("kernels", TESTS / "test_plugins_on_gpu.py", modules=KERNEL_MODULES),
    Part("attention kernels", TESTS / "test_row_attention_on_gpu.py", modules=KERNEL_MODULES),
    Part("acceptance kernels", TESTS / "test_acceptance_on_gpu.py", modules=KERNEL_MODULES),
    Part("device sessions", TESTS / "test_device_sessions.py"),
    Part("device runtime", TESTS / "test_device_runtime.py"),
    Part("plugin microbenchmark", REPOSITORY / "perf" / "plugin_microbench.py", modules=KERNEL_MODULES),
    Part("device steps", REPOSITORY / "perf" / "device_steps.py", ("--backend", "reference")),
    Part("device costs", REPOSITORY / "perf" / "device_costs.py"),
    Part("plugins in TensorRT", TESTS / "test_plugins_in_tensorrt.py", needs_tensorrt=True),
    Part("TensorRT engines", TESTS / "test_tensorrt_engines.py", needs_tensorrt=True),
    Part(
        "families of drafters in TensorRT",
        TESTS / "test_tensorrt_families.py",
        modules=(*RUNTIME_MODULES, "transformers", "onnxruntime"),  # the oracles
        needs_tensorrt=True,
    ),
    Part("TensorRT steps", REPOSITORY / "perf" / "device_steps.py", ("--backend", _tensorrt()), needs_tensorrt=True),
)

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, slots=True)
class Result:
    part: str
    status: Status
    seconds: float = 0.0
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def gpu() -> dict[str, Any] | None:
    """Name, SM and memory of the first GPU that torch sees."""
    if find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    sm = 10 * properties.major + properties.minor
    return {"name": properties.name, "sm": sm, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}


def reason_not_to_run(part: Part, sm: int) -> str:
    """Why a part cannot run here; empty when it can."""
    if not part.needs_tensorrt:
        return ""
    if find_spec("tensorrt") is None and find_spec("tensorrt_rtx") is None:
        return "neither tensorrt nor tensorrt_rtx is installed"
    if find_spec("tensorrt") is None and sm in RTX_WITHOUT_CODE:
        return f"tensorrt_rtx has no code for SM {sm}, and tensorrt is not installed"
    return ""


def missing_modules(part: Part) -> list[str]:
    return [name for name in part.modules if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False


def run_part(part: Part, seconds: float) -> Result:
    """Run a part in a process of its own for at most so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        command = [sys.executable, str(part.file), *part.arguments, "--output", str(report)]
        if part.is_test:
            options = ["-q", "-c", os.devnull, "--rootdir", str(REPOSITORY), "-p", "no:cacheprovider"]
            options += ["-W", "ignore::pytest.PytestUnknownMarkWarning", f"--junitxml={report}"]
            command = [sys.executable, "-m", "pytest", *options, str(part.file)]
        required = {"DSPARK_REQUIRE_GPU": "1"} | ({"DSPARK_REQUIRE_TENSORRT": "1"} if part.needs_tensorrt else {})
        started = time.perf_counter()
        try:
            status = subprocess.run(command, cwd=REPOSITORY, env=os.environ | required, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            return Result(part.name, "failed", seconds, f"not finished after {seconds:.0f} s")
        elapsed = time.perf_counter() - started
        if not report.exists():
            return Result(part.name, "failed", elapsed, f"exit status {status}, no report")
        data = _counts(report) if part.is_test else json.loads(report.read_text())
        detail = ", ".join(f"{count} {name}" for name, count in data.items()) if part.is_test else ""
        return Result(part.name, "passed" if status == 0 else "failed", elapsed, detail, data)


def _counts(junit: Path) -> dict[str, int]:
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    total = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    passed = total["tests"] - total["failures"] - total["errors"] - total["skipped"]
    return {"passed": passed, "failed": total["failures"] + total["errors"], "skipped": total["skipped"]}


def run_all(sm: int, seconds: float) -> list[Result]:
    deadline = time.monotonic() + seconds
    results = []
    for part in PARTS:
        remaining = deadline - time.monotonic()
        print(f"== {part.name}", flush=True)
        if reason := reason_not_to_run(part, sm):
            results.append(Result(part.name, "not run", detail=reason))
        elif missing := missing_modules(part):
            results.append(
                Result(part.name, "failed", detail=f"expected the packages {', '.join(missing)}, found none")
            )
        elif remaining <= 0:
            results.append(Result(part.name, "failed", detail=f"the {seconds:.0f} s of the check are used up"))
        else:
            results.append(run_part(part, remaining))
    return results


def table(results: list[Result]) -> str:
    lines = [f"{result.part:24}{result.status:10}{result.seconds:7.0f} s  {result.detail}" for result in results]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    installed = {distribution.name.lower() for distribution in metadata.distributions()}
    return {"python": sys.version.split()[0]} | {n: metadata.version(n) for n in VERSIONS if n in installed}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="JSON report [gpu_check.json]")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help="time for everything [470]")
    options = parser.parse_args(arguments)
    found = gpu()
    if found is None:
        print("gpu_check: expected a CUDA GPU that torch sees, found none; run it on a GPU host", file=sys.stderr)
        return 3
    results = run_all(found["sm"], options.seconds)
    print(f"\n{found['name']} (SM {found['sm']})\n{table(results)}")
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": found,
        "versions": versions(),
        "parts": [asdict(result) for result in results],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    partial = options.output.with_name(options.output.name + ".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(options.output)
    print(f"report: {options.output}")
    return 4 if any(result.status == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
