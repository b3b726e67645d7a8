"""S18: links that lie where we write are not followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.building.build import exclusive
from dspark_trt.errors import ManifestError
from dspark_trt.files import remove_partial, replace_folder, write_atomically


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A file of somebody else's."""
    path = tmp_path / "other"
    path.write_text("theirs")
    return path


def test_link_in_place_of_the_scratch_file_is_not_written_through(tmp_path: Path, other: Path) -> None:
    (tmp_path / ".manifest.json.partial").symlink_to(other)
    (tmp_path / "manifest.json").symlink_to(other)
    write_atomically(tmp_path / "manifest.json", "ours")
    assert other.read_text() == "theirs"
    assert (tmp_path / "manifest.json").read_text() == "ours"
    assert not (tmp_path / "manifest.json").is_symlink()


def test_nothing_half_written_is_left_where_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "\ud800")
    assert not list(tmp_path.iterdir())


def test_link_in_place_of_the_lock_is_refused_and_what_it_points_at_is_kept(tmp_path: Path, other: Path) -> None:
    output = tmp_path / "build"
    output.mkdir()
    (output / ".lock").symlink_to(other)
    with pytest.raises(ManifestError, match=r"\.lock cannot be opened .*expected a file of our own, no link"):
        exclusive(output).__enter__()
    assert other.read_text() == "theirs"


def test_what_a_lock_file_holds_is_not_cut_off(tmp_path: Path) -> None:
    output = tmp_path / "build"
    output.mkdir()
    (output / ".lock").write_text("a note")
    (output / "kept").write_text("")
    with exclusive(output):
        assert (output / ".lock").read_text() == "a note"


@pytest.mark.parametrize("name", [".stage.partial", ".stage.old.partial", "stage"])
def test_link_in_place_of_a_stage_folder_is_replaced_and_its_end_left_alone(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("theirs")
    (tmp_path / name).symlink_to(theirs)
    with replace_folder(tmp_path / "stage") as scratch:
        (scratch / "file").write_text("ours")
    assert (theirs / "file").read_text() == "theirs"
    assert (tmp_path / "stage/file").read_text() == "ours"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stage", "theirs"]


def test_remains_of_an_interrupted_run_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".stage.partial/folder").mkdir(parents=True)
    (tmp_path / ".stage.old.partial").write_text("a file in its place")
    remove_partial(tmp_path / "stage")
    assert not list(tmp_path.iterdir())
