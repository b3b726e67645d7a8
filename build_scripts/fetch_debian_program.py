"""A program out of a Debian package, alone, with no service installed: promtool checks alert rules, nginx balances.

python build_scripts/fetch_debian_program.py promtool|nginx FOLDER
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = {"promtool": ("prometheus", "usr/bin/promtool"), "nginx": ("nginx", "usr/sbin/nginx")}


def fetch(program: str, folder: Path) -> Path:
    """The one on PATH, or the one in `folder`, fetched there if need be. Raises CalledProcessError of apt-get."""
    if installed := shutil.which(program):
        return Path(installed)
    tool = folder / program
    if not tool.exists():
        package, path = PACKAGES[program]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            subprocess.run(["apt-get", "download", "-qq", package], cwd=scratch, check=True)
            (archive,) = Path(scratch).glob(f"{package}_*.deb")
            subprocess.run(["dpkg-deb", "--extract", archive, scratch], check=True)
            (Path(scratch) / path).rename(tool)
    return tool


if __name__ == "__main__":
    print(fetch(sys.argv[1], Path(sys.argv[2])))
