"""Versioned manifests with a sha256 chain: every stage of a build says what it was made from and what it wrote.

A stage is a folder of the build directory with a `manifest.json`. Its `key` is the sha256 of everything that decides
its content: settings, sha256 of its input files, keys of the stages before it, and the schema version. A stage whose
recorded key is the wanted one, and whose files are unchanged, is skipped. "Unchanged" is decided by size, modification
time and inode; where those differ (a copied or moved directory), or under `verify`, the bytes are hashed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.errors import ManifestError, abridged, place

Model = TypeVar("Model", bound=BaseModel)

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
STAGE_NAMES = ("checkpoints", "graphs", "engines", "steptable", "calibration", "triton_model_repo")  # in build order


class FileRecord(BaseModel):
    """One file, as it was when it was hashed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int  # bytes
    mtime_ns: int
    inode: int
    sha256: str

    @classmethod
    def of(cls, path: Path, known: FileRecord | None = None) -> Self:
        """Record a file; the hash of `known` is kept where size, modification time and inode are the same."""
        stat = path.stat()
        signature = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        if known is not None and signature == (known.size, known.mtime_ns, known.inode):
            digest = known.sha256
        else:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(size=stat.st_size, mtime_ns=stat.st_mtime_ns, inode=stat.st_ino, sha256=digest)


class StageManifest(BaseModel):
    """What one stage was made from and what it wrote."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int
    stage: str
    key: str
    settings: dict[str, Any]
    predecessors: dict[str, str]  # stage name -> key
    inputs: dict[str, FileRecord]  # absolute path -> record
    outputs: dict[str, FileRecord]  # path within the stage folder -> record
    created: str
    versions: dict[str, str]
    sha256: str = ""  # of everything else in the file; set when it is written, checked when it is read


class BuildSummary(BaseModel):
    """DIR/manifest.json: written last, so its presence says that every stage was finished."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int
    recipe: BuildRecipe  # resolved
    stages: dict[str, str]  # stage name -> key, in build order
    sha256: str = ""  # as in StageManifest


def hash_key(*parts: Any) -> str:
    """sha256 of the canonical JSON of `parts`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def code_hash(package: str) -> str:
    """sha256 of the Python sources of a package, so that what an older version wrote is not taken for today's.

    `package.name_*`: of those of its modules alone.
    """
    parent, _, pattern = package.rpartition(".")
    has_pattern = "*" in pattern
    spec = find_spec(parent if has_pattern else package)
    assert spec is not None, package
    assert spec.submodule_search_locations, f"{package} is a package of ours, not a module"
    folder = Path(spec.submodule_search_locations[0])
    sources = sorted(folder.glob(f"{pattern}.py") if has_pattern else folder.rglob("*.py"))
    assert sources, f"{package} names no source"
    return hash_key([(source.name, hashlib.sha256(source.read_bytes()).hexdigest()) for source in sources])


def stage_key(
    stage: str, settings: Mapping[str, Any], predecessors: Mapping[str, str], inputs: Mapping[str, FileRecord]
) -> str:
    """The key of a stage; input files count by name and content, not by the folder they lie in."""
    content = sorted((Path(path).name, record.sha256) for path, record in inputs.items())
    return hash_key(SCHEMA_VERSION, stage, settings, predecessors, content)


def read_manifest(folder: Path) -> StageManifest:
    """Raises ManifestError when it is missing, malformed or of another schema."""
    return _read(folder / MANIFEST_NAME, StageManifest)


def read_summary(build: Path) -> BuildSummary:
    """Raises ManifestError when `build` is not a finished build directory."""
    path = build / MANIFEST_NAME
    summary = _read(path, BuildSummary)
    if odd := sorted(set(summary.stages) ^ set(STAGE_NAMES)):
        raise ManifestError(f"{path}: stages {odd} are missing or unknown; run `dspark-trt build` again")
    return summary


def is_stage_folder(folder: Path) -> bool:
    """Whether a build made `folder`: a build of any version, and whether or not it is intact."""
    try:
        data = json.loads((folder / MANIFEST_NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("stage") == folder.name


def _read(path: Path, model: type[Model]) -> Model:
    try:
        data = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(f"{path} does not exist: not a finished build; run `dspark-trt build`") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is not valid JSON ({error}); remove {path.parent} and build again") from None
    found = data.get("schema_version") if isinstance(data, dict) else None
    if found != SCHEMA_VERSION:
        raise ManifestError(f"{path}: expected schema_version {SCHEMA_VERSION}, found {abridged(found)}; build again")
    if data.get("sha256") != _seal(data):
        raise ManifestError(f"{path} was edited: its sha256 is not that of its content; run `dspark-trt build` again")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = place(first["loc"])
        raise ManifestError(f"{path}: {where}: {first['msg']}; remove {path.parent} and build again") from None


def sealed_json(data: Mapping[str, Any]) -> str:
    """The text of a manifest file with this content: its own sha256 comes with it."""
    return json.dumps({**data, "sha256": _seal(data)}, indent=1) + "\n"


def _seal(data: Mapping[str, Any]) -> str:
    return hash_key({name: value for name, value in data.items() if name != "sha256"})


def check_chain(build: Path, summary: BuildSummary, stages: Mapping[str, StageManifest]) -> None:
    """Raises ManifestError where a stage is not the one that its successors, or the summary, were made from."""
    for name, manifest in stages.items():
        wanted = stage_key(name, manifest.settings, manifest.predecessors, manifest.inputs)
        links = {"its own content": wanted, "the build's manifest": summary.stages[name]}
        links |= {
            f"stage {later!r}": other.predecessors[name]
            for later, other in stages.items()
            if name in other.predecessors
        }
        for said_by, key in links.items():
            if key != manifest.key:
                raise ManifestError(
                    f"{build / name}: key {manifest.key[:16]}… does not match {key[:16]}… of {said_by}: the stage "
                    "comes from another build or was edited, or a build was not finished here; run `dspark-trt build` "
                    "again"
                )


def write_manifest(folder: Path, manifest: StageManifest) -> None:
    (folder / MANIFEST_NAME).write_text(sealed_json(manifest.model_dump(mode="json")))


def record_inputs(files: Iterable[Path], known: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Records by absolute path; hashes of `known` are kept where the file did not change."""
    paths = sorted({path.absolute() for path in files})
    return {str(path): FileRecord.of(path, known.get(str(path))) for path in paths}


def record_outputs(folder: Path) -> dict[str, FileRecord]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    return {str(path.relative_to(folder)): FileRecord.of(path) for path in files}


def check_outputs_exist(folder: Path, manifest: StageManifest) -> None:
    """Raises ManifestError that names the first file that is missing."""
    for name in manifest.outputs:
        if not (folder / name).is_file():
            raise ManifestError(f"{folder / name} is missing; run `dspark-trt build` again")


def check_outputs(folder: Path, manifest: StageManifest, *, verify: bool = False) -> None:
    """Raises ManifestError that names the first file that is missing or whose bytes changed."""
    check_outputs_exist(folder, manifest)
    for name, record in manifest.outputs.items():
        path = folder / name
        found = FileRecord.of(path, None if verify else record).sha256
        if found != record.sha256:
            raise ManifestError(
                f"{path} was changed: expected sha256 {record.sha256[:16]}…, found {found[:16]}…; "
                f"remove {folder} and run `dspark-trt build` again"
            )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
