"""Files and folders that are there whole or not at all.

Names beside a destination can be guessed, and where others may write, a link can lie there first: it is removed, and
never followed to what it points at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def default_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/dspark-trt`, or `~/.cache/dspark-trt`. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark-trt"


@contextmanager
def replace_folder(destination: Path) -> Iterator[Path]:
    """A scratch folder beside `destination` that takes its place when the block ends well and vanishes when it does
    not."""
    scratch = _scratch(destination)
    remove_partial(destination)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        if destination.exists():
            destination.rename(_retired(destination))
        scratch.rename(destination)
    finally:
        remove_partial(destination)


def remove_partial(destination: Path) -> None:
    """Clear what an interrupted run left behind."""
    for folder in (_scratch(destination), _retired(destination)):
        if folder.is_symlink() or folder.is_file():
            folder.unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _scratch(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.partial")


def _retired(destination: Path) -> Path:
    """Where the old folder waits for its removal, so that no folder under its own name is ever half removed."""
    return destination.with_name(f".{destination.name}.old.partial")


def write_atomically(path: Path, content: str | bytes) -> None:
    scratch = path.with_name(f".{path.name}.partial")
    scratch.unlink(missing_ok=True)
    try:
        with scratch.open("xb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def open_lock(path: Path) -> IO[str]:
    """A file to lock, made where it is not there; what it holds is left alone. Raises OSError where it is a link."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "w")
