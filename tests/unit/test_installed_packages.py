"""What an installation holds, asked of setuptools: every folder with sources, and nothing of tests and measurements."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDERS = {"dspark_trt": "dspark_trt", "plugins": "dspark_trt_plugins", "triton_model_repo": "dspark_trt_model_repo"}
ASK = (
    "import json, setuptools; from distutils.core import run_setup; "
    "print(json.dumps(run_setup('setup.py', stop_after='init').packages))"
)


def packages(repository: Path) -> list[str]:
    said = subprocess.run([sys.executable, "-c", ASK], cwd=repository, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(said.stdout.splitlines()[-1])
    return found


def folders_with_sources(folder: str, package: str) -> list[str]:
    """As dotted names; a version folder of Triton's (`1`) is data, not a package."""
    found = {path.parent.relative_to(REPOSITORY / folder).parts for path in (REPOSITORY / folder).rglob("*.py")}
    return [".".join((package, *parts)) for parts in found if all(part.isidentifier() for part in parts)]


def test_every_folder_with_sources_is_installed_and_nothing_else() -> None:
    expected = [name for folder, package in FOLDERS.items() for name in folders_with_sources(folder, package)]
    assert sorted(packages(REPOSITORY)) == sorted(expected)


def test_new_room_is_installed_without_being_listed(tmp_path: Path) -> None:
    for folder in FOLDERS:
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    for room in ("dspark_trt/graphs/medusa", "plugins/tree_attention"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    assert {"dspark_trt.graphs.medusa", "dspark_trt_plugins.tree_attention"} <= set(packages(tmp_path))
