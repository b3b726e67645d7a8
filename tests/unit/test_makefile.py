"""`make test` runs every folder of tests, in one half or the other."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from find_pythons import VERSIONS, interpreters

REPOSITORY = Path(__file__).parents[2]
ELSEWHERE = {"support", "gpu"}  # helpers; tests that `build_scripts/gpu_check.sh` runs on a GPU host


def test_unit_tests_can_run_under_every_python_that_is_supported() -> None:
    needed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f">={VERSIONS[0]}" in needed
    for version in VERSIONS:
        for python in interpreters(version):
            said = subprocess.run([python, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
            assert said.stdout.startswith(f"{version}.")
    assert interpreters("{}.{}".format(*sys.version_info)), "this one is of one of these versions"
    recipe = (REPOSITORY / "Makefile").read_text().partition("\ntest-pythons:")[2].partition("\n\n")[0]
    assert "find_pythons.py" in recipe
    assert "test-units" in recipe


def test_both_halves_together_run_every_folder_of_tests() -> None:
    text = (REPOSITORY / "Makefile").read_text()
    halves = re.findall(r"^test-(?:rooms|engines):.*\n\t(.*-m pytest.*)$", text, flags=re.MULTILINE)
    assert len(halves) == 2
    named = {word.removeprefix("tests/") for half in halves for word in half.split() if word.startswith("tests/")}
    tests = REPOSITORY / "tests"
    assert named == {path.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")} - ELSEWHERE
