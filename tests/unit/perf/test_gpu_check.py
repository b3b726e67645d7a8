"""The GPU check reports what each part did, also where one fails, hangs or cannot run; without a GPU it says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_check import PARTS, RUNTIME_MODULES, Part, Result, main, missing_modules, reason_not_to_run, run_part, table

REPOSITORY = Path(__file__).parents[3]
# Of the package, its backends and its tests: a GPU host need not have them
OTHER_PACKAGES = "hypothesis huggingface_hub jinja2 onnxruntime rich scipy tokenizers transformers tritonclient typer"
IMPORT_WITHOUT = """
import runpy, sys
class Missing:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
runpy.run_path(sys.argv[1], run_name="imported")
"""


def part(folder: Path, name: str, text: str) -> Part:
    (folder / name).write_text(text)
    return Part("part", folder / name)


def test_every_part_is_there() -> None:
    for each in PARTS:
        assert each.file.exists(), each.file


def test_every_gpu_test_is_part_of_the_check() -> None:
    assert {each.file for each in PARTS if each.is_test} == set((REPOSITORY / "tests" / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("name", [each.name for each in PARTS if not each.needs_tensorrt])
def test_a_part_imports_nothing_that_its_check_does_not_ask_for(name: str) -> None:
    (each,) = (each for each in PARTS if each.name == name)
    lacking = {*OTHER_PACKAGES.split(), *RUNTIME_MODULES} - set(each.modules)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "perf")])}
    command = [sys.executable, "-c", IMPORT_WITHOUT, str(each.file), " ".join(lacking)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_counts_of_a_test_file_are_reported(tmp_path: Path) -> None:
    text = "import pytest\ndef test_a(): pass\ndef test_b(): assert False\n@pytest.mark.skip\ndef test_c(): pass\n"
    result = run_part(part(tmp_path, "test_it.py", text), 60)
    assert (result.status, result.data) == ("failed", {"passed": 1, "failed": 1, "skipped": 1})
    assert result.detail == "1 passed, 1 failed, 1 skipped"
    result = run_part(part(tmp_path, "test_it.py", "def test_a(): pass\n"), 60)
    assert (result.status, result.data["passed"]) == ("passed", 1)


def test_a_benchmark_hands_over_its_json(tmp_path: Path) -> None:
    text = "import pathlib, sys\npathlib.Path(sys.argv[sys.argv.index('--output') + 1]).write_text('{\"rows\": [1]}')\n"
    assert run_part(part(tmp_path, "benchmark.py", text), 60).data == {"rows": [1]}
    failed = run_part(part(tmp_path, "benchmark.py", "raise SystemExit(3)"), 60)
    assert (failed.status, failed.detail) == ("failed", "exit status 3, no report")


def test_a_part_that_hangs_is_stopped(tmp_path: Path) -> None:
    result = run_part(part(tmp_path, "benchmark.py", "import time\ntime.sleep(60)\n"), 1)
    assert (result.status, result.detail) == ("failed", "not finished after 1 s")


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = next(each for each in PARTS if each.name == "TensorRT engines")
    assert reason_not_to_run(engines, 89) == ""  # tensorrt_rtx is installed for the tests
    assert "no code for SM 90" in reason_not_to_run(engines, 90)
    monkeypatch.setattr("gpu_check.find_spec", lambda name: None)
    assert "neither tensorrt nor tensorrt_rtx" in reason_not_to_run(engines, 90)
    assert missing_modules(Part("part", Path("test_it.py"), modules=("numpy",))) == ["numpy"]


def test_the_table_has_a_line_for_each_part() -> None:
    lines = table([Result("kernels", "passed", 12.4, "3 passed"), Result("b", "not run", detail="why")]).splitlines()
    assert lines[0].split() == ["kernels", "passed", "12", "s", "3", "passed"]
    assert lines[1].endswith("why")


def test_without_a_gpu_the_exit_status_is_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpu_check.gpu", lambda: None)
    assert main([]) == 3
    assert "expected a CUDA GPU that torch sees, found none" in capsys.readouterr().err


def test_the_script_finds_the_repository_and_keeps_the_exit_status() -> None:
    script = REPOSITORY / "build_scripts" / "gpu_check.sh"
    result = subprocess.run(
        [script],
        capture_output=True,
        text=True,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 3
    assert "gpu_check: expected a CUDA GPU" in result.stderr
