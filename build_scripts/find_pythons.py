"""Prints the interpreters of each Python that the package supports, of those on PATH and of pyenv that start."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"


def interpreters(version: str) -> list[str]:
    """Each once, whatever names lead to it. A shim of pyenv whose version is not chosen does not start."""
    candidates = [shutil.which(f"python{version}"), *map(str, sorted(PYENV.glob(f"{version}.*/bin/python")))]
    works = [
        path
        for path in dict.fromkeys(candidates)
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
    ]
    return list({os.path.realpath(path): path for path in works}.values())


if __name__ == "__main__":
    print("\n".join(found[0] for version in VERSIONS if (found := interpreters(version))))
