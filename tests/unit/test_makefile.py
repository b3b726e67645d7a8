"""`make test` runs every folder of tests, in one half or the other."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ELSEWHERE = {"support", "gpu"}  # helpers; tests that `build_scripts/gpu_check.sh` runs on a GPU host


def test_both_halves_together_run_every_folder_of_tests() -> None:
    text = (REPOSITORY / "Makefile").read_text()
    halves = re.findall(r"^test-\w+:.*\n\t(.*-m pytest.*)$", text, flags=re.MULTILINE)
    assert len(halves) == 2
    named = {word.removeprefix("tests/") for half in halves for word in half.split() if word.startswith("tests/")}
    tests = REPOSITORY / "tests"
    assert named == {path.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")} - ELSEWHERE
