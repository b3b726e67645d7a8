"""The manifest chain: what it notices, and what it leaves behind when a stage fails."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.building.manifest import (
    SCHEMA_VERSION,
    BuildSummary,
    FileRecord,
    StageManifest,
    check_chain,
    check_outputs,
    code_hash,
    now,
    read_manifest,
    read_summary,
    record_inputs,
    record_outputs,
    sealed_json,
    stage_key,
    write_manifest,
)
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.errors import ManifestError
from dspark_trt.files import replace_folder

RECIPE = BuildRecipe(target="t", drafter="d")


def make_stage(folder: Path, predecessors: dict[str, str]) -> StageManifest:
    folder.mkdir()
    (folder / "data.bin").write_bytes(b"weights")
    manifest = StageManifest(
        schema_version=SCHEMA_VERSION,
        stage=folder.name,
        key=stage_key(folder.name, {"precision": "fp32"}, predecessors, {}),
        settings={"precision": "fp32"},
        predecessors=predecessors,
        inputs={},
        outputs=record_outputs(folder),
        created=now(),
        versions={},
    )
    write_manifest(folder, manifest)
    return manifest


def test_manifest_survives_writing_and_reading(tmp_path: Path) -> None:
    manifest = make_stage(tmp_path / "graphs", {})
    read = read_manifest(tmp_path / "graphs")
    assert read.model_copy(update={"sha256": ""}) == manifest


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data.update(outputs={}),
        lambda data: data["versions"].update(numpy="0"),
        lambda data: data.pop("sha256"),
        lambda data: data.update(created="1970"),
    ],
)
def test_every_edit_of_a_manifest_is_seen(tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Outputs that were emptied would leave nothing to check, and say that the chain is intact."""
    make_stage(tmp_path / "graphs", {})
    path = tmp_path / "graphs" / "manifest.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ManifestError, match=r"graphs/manifest\.json was edited.*build` again"):
        read_manifest(tmp_path / "graphs")


def test_known_hash_is_kept_only_while_size_time_and_inode_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    known = FileRecord.of(path).model_copy(update={"sha256": "as recorded"})
    assert FileRecord.of(path, known).sha256 == "as recorded"
    path.write_bytes(b"two")
    os.utime(path, ns=(known.mtime_ns + 1, known.mtime_ns + 1))
    assert FileRecord.of(path, known).sha256 != "as recorded"


def test_changed_output_is_named(tmp_path: Path) -> None:
    manifest = make_stage(tmp_path / "graphs", {})
    (tmp_path / "graphs" / "data.bin").write_bytes(b"weightz")
    with pytest.raises(ManifestError, match=r"data\.bin was changed: expected sha256"):
        check_outputs(tmp_path / "graphs", manifest, verify=True)


def test_missing_output_is_named(tmp_path: Path) -> None:
    manifest = make_stage(tmp_path / "graphs", {})
    (tmp_path / "graphs" / "data.bin").unlink()
    with pytest.raises(ManifestError, match=r"data\.bin is missing"):
        check_outputs(tmp_path / "graphs", manifest)


def test_copied_directory_is_accepted_by_hashing(tmp_path: Path) -> None:
    manifest = make_stage(tmp_path / "graphs", {})
    shutil.copytree(tmp_path / "graphs", tmp_path / "copy")
    os.utime(tmp_path / "copy" / "data.bin", ns=(1, 1))
    check_outputs(tmp_path / "copy", manifest)


def test_chain_refuses_a_stage_of_another_build(tmp_path: Path) -> None:
    first = make_stage(tmp_path / "graphs", {})
    second = make_stage(tmp_path / "engines", {"graphs": "another key"})
    summary = BuildSummary(
        schema_version=SCHEMA_VERSION, recipe=RECIPE, stages={"graphs": first.key, "engines": second.key}
    )
    with pytest.raises(ManifestError, match="comes from another build or was edited"):
        check_chain(tmp_path, summary, {"graphs": first, "engines": second})


def test_chain_refuses_edited_settings(tmp_path: Path) -> None:
    manifest = make_stage(tmp_path / "graphs", {})
    summary = BuildSummary(schema_version=SCHEMA_VERSION, recipe=RECIPE, stages={"graphs": manifest.key})
    edited = manifest.model_copy(update={"settings": {"precision": "int4"}})
    with pytest.raises(ManifestError, match="its own content"):
        check_chain(tmp_path, summary, {"graphs": edited})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_malformed_manifest_is_one_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_inputs_count_by_content_not_by_folder(tmp_path: Path) -> None:
    keys = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        inputs = record_inputs([tmp_path / name / "config.json"], {})
        keys.append(stage_key("checkpoints", {}, {}, inputs))
    assert keys[0] == keys[1]


def test_failed_stage_leaves_the_old_folder_and_nothing_half_written(tmp_path: Path) -> None:
    destination = tmp_path / "graphs"
    destination.mkdir()
    (destination / "old").touch()

    def write_half() -> None:
        with replace_folder(destination) as scratch:
            (scratch / "new").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert [path.name for path in tmp_path.iterdir()] == ["graphs"]
    assert (destination / "old").exists()


def test_summary_must_name_every_stage(tmp_path: Path) -> None:
    summary = BuildSummary(schema_version=SCHEMA_VERSION, recipe=RECIPE, stages={"graphs": "key", "other": "key"})
    (tmp_path / "manifest.json").write_text(sealed_json(summary.model_dump(mode="json")))
    with pytest.raises(ManifestError, match=r"calibration.*other.*missing or unknown"):
        read_summary(tmp_path)


def test_summary_with_an_unknown_recipe_key_is_one_clear_error(tmp_path: Path) -> None:
    data = {"schema_version": SCHEMA_VERSION, "recipe": {"target": "t", "drafter": "d", "odd": 1}, "stages": {}}
    (tmp_path / "manifest.json").write_text(sealed_json(data))
    with pytest.raises(ManifestError, match=r"recipe\.odd"):
        read_summary(tmp_path)


def test_replaced_folder_is_never_half_removed_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = tmp_path / "graphs"
    destination.mkdir()
    (destination / "old").touch()
    removed: list[str] = []
    remove = shutil.rmtree

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        removed.append(path.name)
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with replace_folder(destination) as scratch:
        (scratch / "new").touch()
    assert all(name.endswith(".partial") for name in removed)
    assert [path.name for path in destination.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["graphs"]


def test_code_of_a_package_or_of_some_of_its_modules_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_code"
    package.mkdir()
    for name in ("__init__", "compile_a", "compile_b", "run"):
        (package / f"{name}.py").write_text(name)
    monkeypatch.syspath_prepend(tmp_path)
    whole, part = code_hash("package_of_code"), code_hash("package_of_code.compile_*")
    (package / "run.py").write_text("another")
    assert code_hash("package_of_code") != whole
    assert code_hash("package_of_code.compile_*") == part
    (package / "compile_b.py").write_text("another")
    assert code_hash("package_of_code.compile_*") != part
    with pytest.raises(AssertionError, match="names no source"):
        code_hash("package_of_code.missing_*")
