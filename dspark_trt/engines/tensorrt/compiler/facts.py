"""`{graph}.json` beside `{graph}.engine`:
what an engine was compiled from, with and for, read back when it is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dspark_trt.engines.tensorrt.compiler.profiles import Profile
from dspark_trt.engines.tensorrt.library import Library
from dspark_trt.errors import EngineBuildError

ENGINE_SUFFIX = ".engine"


class EngineFacts(BaseModel):
    """Facts of one engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    library: Library
    library_version: str
    sms: tuple[int, ...]  # GPU architectures that the engine runs on
    use_plugins: bool
    profiles: tuple[Profile, ...]  # in the engine's order
    metadata: dict[str, str]  # of the graph: dims
    layers: dict[str, int]  # number of network layers by type
    warnings: tuple[str, ...]  # of parser and compiler
    weight_bytes: int
    engine_bytes: int
    build_s: float


def engine_path(folder: Path, graph: str) -> Path:
    """Where the engine of one of profiles.GRAPHS stands."""
    return (folder / graph).with_suffix(ENGINE_SUFFIX)


def facts_path(folder: Path, graph: str) -> Path:
    return (folder / graph).with_suffix(".json")


def read_facts(folder: Path, graph: str) -> EngineFacts:
    """Raises EngineBuildError when the file is missing or not of this version."""
    path = facts_path(folder, graph)
    try:
        return EngineFacts.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise EngineBuildError(f"{path} cannot be read ({error}); run `dspark-trt build` again") from None
