"""Debian's promtool, which checks alert rules: the program alone, out of its package, with no service installed.

python build_scripts/fetch_promtool.py FOLDER
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def fetch(folder: Path) -> Path:
    """The promtool on PATH, or the one in `folder`, fetched there if need be. Raises CalledProcessError of apt-get."""
    if installed := shutil.which("promtool"):
        return Path(installed)
    tool = folder / "promtool"
    if not tool.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=scratch, check=True)
            (package,) = Path(scratch).glob("prometheus_*.deb")
            subprocess.run(["dpkg-deb", "--extract", package, scratch], check=True)
            (Path(scratch) / "usr/bin/promtool").rename(tool)
    return tool


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
