"""Tools that come inside wheels but do not belong into the environment: unpacked once into a cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.files import default_cache_folder

__all__ = ["assemble", "default_cache_folder", "download_wheel", "missing_libraries", "prepend"]


def assemble(folder: Path, fill: Callable[[Path, Path], None]) -> None:
    """Make `folder`, unless it is there, of what `fill(scratch, contents)` puts into `contents`, all at once."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        contents = Path(scratch) / "contents"
        contents.mkdir()
        fill(Path(scratch), contents)
        try:
            contents.rename(folder)
        except OSError:
            if not folder.exists():  # another process was first: its folder is as good as ours
                raise


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Fetch one wheel by name, without its dependencies, with the pip of this interpreter.

    Raises EnvironmentMissingError with pip's last line.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", folder, f"{package}=={version}"], capture_output=True, text=True)
    wheels = list(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise EnvironmentMissingError(
            f"cannot download {package}=={version} for this machine: {lines[-1] if lines else 'pip fetched no wheel'}; "
            f"check `{sys.executable} -m pip download --no-deps {package}=={version}`"
        )
    return wheels[0]


def missing_libraries(binary: Path, environment: Mapping[str, str]) -> list[str]:
    """Libraries that the loader would not find for `binary`."""
    listing = subprocess.run(["ldd", binary], capture_output=True, text=True, env=environment).stdout
    return [line.split()[0] for line in listing.splitlines() if "not found" in line]


def prepend(environment: dict[str, str], variable: str, folder: Path | None) -> None:
    """Put a folder in front of a search path."""
    if folder is not None:
        rest = environment.get(variable)
        environment[variable] = f"{folder}{os.pathsep}{rest}" if rest else str(folder)
