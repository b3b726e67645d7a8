"""`make test` runs every folder of tests, in one half or the other."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ELSEWHERE = {"support", "gpu"}  # helpers; tests that `build_scripts/gpu_check.sh` runs on a GPU host


def test_both_halves_together_run_every_folder_of_tests() -> None:
    lines = (REPOSITORY / "Makefile").read_text().splitlines()
    named = [
        word for line in lines if "-m pytest" in line and "fuzz" not in line.split(":")[0] for word in line.split()
    ]
    found = [word.removeprefix("tests/") for word in named if word.startswith("tests/") and word.count("/") == 1]
    folders = {
        path.parent.relative_to(REPOSITORY / "tests").parts[0] for path in (REPOSITORY / "tests").rglob("test_*.py")
    }
    assert set(found) == folders - ELSEWHERE
