"""Where a checkpoint lies on this machine: a folder, a GGUF file, or a model of the Hugging Face hub."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import Any

from dspark_trt.checkpoints.safetensors_store import HEADS_FILE, INDEX_FILE, SINGLE_FILE, indexed_files, shard_files
from dspark_trt.errors import CheckpointError, EnvironmentMissingError

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def locate(source: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """The folder or the .gguf file that `source` means; a hub id is downloaded into the hub's cache (or found there).

    Without weights, only the small files are downloaded: enough to say whether the rest is worth it.

    Raises CheckpointError when there is no such checkpoint, EnvironmentMissingError when the hub cannot be reached and
    the cache does not hold the checkpoint.
    """
    path = locate_here(source, revision)
    if path is not None:
        return path
    return _download(source, revision, with_weights=with_weights)


def locate_here(source: str, revision: str | None = None) -> Path | None:
    """The local path that `source` means; None for what can only be a hub id. Raises CheckpointError when it is
    neither."""
    path = Path(source).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(
                f"{source} is a local path, and revision {revision!r} was given; leave the revision out"
            )
        if path.is_file() and path.suffix.lower() != ".gguf":
            raise CheckpointError(
                f"{source}: expected a checkpoint folder, a .gguf file or a hub id, found another file"
            )
        return path
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(source):
        raise CheckpointError(
            f"{source} does not exist; give a checkpoint folder, a .gguf file or a hub id (owner/name)"
        )
    return None


def source_files(path: Path) -> tuple[Path, ...]:
    """Every file that reading the checkpoint at `path` depends on, tokenizer included."""
    if path.is_file():
        return (path,)
    index = () if (path / SINGLE_FILE).is_file() else (INDEX_FILE,)
    return (*(path / name for name in (*TEXT_FILES, *index) if (path / name).is_file()), *shard_files(path))


def _download(repository: str, revision: str | None, *, with_weights: bool) -> Path:
    """The index says what the shards are called, so it comes before them; both from one commit."""
    if not with_weights:
        return _fetch(repository, revision, [*TEXT_FILES])
    folder = _fetch(repository, revision, [*TEXT_FILES, SINGLE_FILE, INDEX_FILE, HEADS_FILE])
    if not (folder / SINGLE_FILE).is_file() and (folder / INDEX_FILE).is_file():
        _fetch(repository, folder.name, [glob.escape(name) for name in indexed_files(folder)])
    return folder


def _fetch(repository: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    http_error: Any = errors.HfHubHTTPError.__mro__[
        1
    ]  # HTTPError of httpx, under whichever name the hub client ships it
    name = f"hub model {repository}" + (f" at revision {revision}" if revision else "")
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError:
        raise CheckpointError(f"{name} is gated: accept its terms on the hub, then run `hf auth login`") from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{name}: no such revision; look at the model's branches and tags on the hub") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{name} does not exist or is private, and {repository} is no local path either; check the spelling, or "
            "run `hf auth login`"
        ) from None
    except errors.HFValidationError as error:
        raise CheckpointError(f"{repository} is neither a local path nor a hub id: {_first_line(error)}") from None
    except (errors.LocalEntryNotFoundError, http_error, OSError) as error:
        raise EnvironmentMissingError(
            f"{name}: the hub cannot be reached, and the local cache does not hold the whole model "
            f"({_first_line(error)}). Download it where there is a network (`hf download`) and give the folder, or "
            "set HF_HOME to a filled cache"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
