"""Whether a file of a checkpoint is what its name says: readable, and not what Git leaves in the place of a large
file."""

from __future__ import annotations

from pathlib import Path

from dspark_trt.errors import CheckpointError

_POINTER = b"version https://git-lfs.github.com/spec/"


def check_file(path: Path) -> None:
    """Raises CheckpointError when `path` may not be read, or is a Git LFS pointer. A file that is not there passes."""
    try:
        with path.open("rb") as stream:
            head = stream.read(len(_POINTER))
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); give this user the right to read it, or a copy of the "
            f"checkpoint"
        ) from None
    if head == _POINTER:
        raise CheckpointError(
            f"{path} is a Git LFS pointer and not the file itself: run `git lfs pull` in {path.parent}, or `hf "
            f"download`"
        )
