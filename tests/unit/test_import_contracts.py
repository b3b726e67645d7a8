"""The import contracts close: on a copy of the sources, each thing that they forbid breaks them, and is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = {  # folder -> the name that it is imported by
    "dspark_trt": "dspark_trt",
    "plugins": "dspark_trt_plugins",
    "triton_model_repo": "dspark_trt_model_repo",
    "perf": "perf",
}
LINT = "import sys; from importlinter.cli import lint_imports_command; sys.argv[1:] = []; lint_imports_command()"

ROOMS = "Rooms import downwards, and each room has its place"
ENGINES = "Engines of devices share a runtime, and those of CPUs know nothing of it"
RUNTIME = "The runtime knows engines by their protocol only"
PLUGINS = "Plugins and model files know nothing of what is above them"
TORCH = "Only engines of devices and the reference import torch"
LOADER = "TensorRT is reached through the plugins' loader, by its engines only"
BARE = "Nothing imports TensorRT by a bare import, or Triton's utilities outside its model files"
PERF = "Measurements stand on the package, and nothing stands on them or on tests"
TESTS = "Measurements import no tests"
FRONT_END = "Only the front end's own process loads an HTTP server and gRPC"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources under the names that they are imported by, with the grimp cache of the first run,
    which makes the rest quick."""
    copy = tmp_path_factory.mktemp("copy")
    for folder, name in SOURCES.items():
        shutil.copytree(REPOSITORY / folder, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    return copy


def lint(repository: Path) -> tuple[int, str]:
    """Exit status, and what was said on one line."""
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(repository)!r}); {LINT}"]
    said = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    return said.returncode, " ".join((said.stdout + said.stderr).split())


def test_contracts_are_kept(copied: Path) -> None:
    status, said = lint(copied)
    assert (status, "0 broken" in said) == (0, True), said


@pytest.mark.parametrize(
    ("source", "statement", "broken", "named"),
    [
        ("dspark_trt/helpers.py", "", ROOMS, "dspark_trt.helpers"),
        ("dspark_trt/extras/__init__.py", "", ROOMS, "dspark_trt.extras"),
        ("dspark_trt/engines/helpers.py", "", ENGINES, "dspark_trt.engines.helpers"),
        ("dspark_trt/checkpoints/rope.py", "import dspark_trt.graphs.rope", ROOMS, "checkpoints.rope -> "),
        ("dspark_trt/graphs/rope.py", "import dspark_trt.engines.open", ROOMS, "graphs.rope -> "),
        ("dspark_trt/engines/settings.py", "import dspark_trt.graphs.rope", ROOMS, "settings -> "),
        ("dspark_trt/serving/worker.py", "import dspark_trt.server.options", ROOMS, "worker -> "),
        ("dspark_trt/graphs/rope.py", "import dspark_trt.building.build", ROOMS, "graphs.rope -> "),
        ("dspark_trt/building/build.py", "import dspark_trt.cli", ROOMS, "building.build -> dspark_trt.cli"),
        ("dspark_trt/building/backends.py", "import dspark_trt.reference.on_device", ROOMS, "backends -> "),
        ("dspark_trt/engines/onnxruntime/memory.py", "import dspark_trt.engines.device.buckets", ENGINES, "memory -> "),
        (
            "dspark_trt/engines/device/buckets.py",
            "import dspark_trt.engines.tensorrt.compiler.facts",
            ENGINES,
            "buckets -> ",
        ),
        ("dspark_trt/runtime/kv.py", "import dspark_trt.engines.capacity", RUNTIME, "runtime.kv -> "),
        ("dspark_trt/runtime/kv.py", "import dspark_trt.steptable.profile", RUNTIME, "runtime.kv -> "),
        ("plugins/body.py", "import dspark_trt.errors", PLUGINS, "body -> dspark_trt.errors"),
        ("dspark_trt/graphs/rope.py", "import torch", TORCH, "graphs.rope -> torch"),
        ("dspark_trt/engines/onnxruntime/memory.py", "import torch", TORCH, "memory -> torch"),
        ("dspark_trt/engines/open.py", "import torch", TORCH, "open -> torch"),
        ("dspark_trt/checkpoints/rope.py", "from transformers import AutoConfig", TORCH, "rope -> transformers"),
        ("plugins/body.py", "import torch", TORCH, "body -> torch"),
        ("dspark_trt/commands/doctor.py", "from dspark_trt_plugins import trt_plugin", LOADER, "doctor -> "),
        ("dspark_trt/engines/tensorrt/session.py", "import tensorrt", BARE, "session -> tensorrt"),
        ("plugins/trt_plugin.py", "import tensorrt_rtx", BARE, "trt_plugin -> tensorrt_rtx"),
        ("dspark_trt/serving/worker.py", "import triton_python_backend_utils", BARE, "serving.worker -> "),
        ("dspark_trt/server/supervisor.py", "import fastapi", FRONT_END, "supervisor -> fastapi"),
        ("dspark_trt/steptable/profile.py", "import perf.overhead", PERF, "profile -> perf"),
        ("dspark_trt/steptable/profile.py", "import tests.support", PERF, "profile -> tests"),
        ("perf/overhead.py", "from tests.support.factories import write_target", TESTS, "overhead -> tests"),
    ],
)
def test_what_is_forbidden_breaks_its_contract(
    copied: Path, source: str, statement: str, broken: str, named: str
) -> None:
    """The statement is put into a function: where it stands makes no difference."""
    folder, _, name = source.partition("/")
    path = copied / SOURCES[folder] / name
    before = path.read_text() if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    path.write_text((before or "") + (f"\n\ndef _late() -> None:\n    {statement}\n" if statement else ""))
    try:
        status, said = lint(copied)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    assert status == 1, said
    assert f"{broken} BROKEN" in said
    assert named in said
