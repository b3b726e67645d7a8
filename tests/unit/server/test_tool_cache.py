"""S9: what is fetched and run is what this release names, on every use."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.server import server_tree
from dspark_trt.server.tool_cache import Wheel, assemble, download_wheel, tree_digest


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that pip asks, with one wheel in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "some_tool-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_tool-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-tool\nVersion: 1.0\n")
        archive.writestr("some_tool-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("some_tool-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


def test_wheel_with_the_pinned_sha256_is_taken(index: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(index.read_bytes()).hexdigest()
    wheel = Wheel("some-tool", "1.0", ("0" * 64, digest))
    assert download_wheel(wheel, tmp_path).read_bytes() == index.read_bytes()


def test_wheel_of_the_right_name_and_another_content_is_refused(index: Path, tmp_path: Path) -> None:
    """An index of the user's pip configuration may hold a package of the same name and version."""
    with pytest.raises(EnvironmentMissingError, match=r"some-tool==1\.0 .*has another sha256 than the one known here"):
        download_wheel(Wheel("some-tool", "1.0", ("0" * 64,)), tmp_path)
    assert not list(tmp_path.glob("*.whl"))


def test_wheel_that_cannot_be_had_says_what_pip_said(index: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissingError, match=r"cannot download some-tool==0\.0.*No matching distribution"):
        download_wheel(Wheel("some-tool", "0.0", ("0" * 64,)), tmp_path)


def fill(scratch: Path, contents: Path) -> None:
    (contents / "bin").mkdir(mode=0o777)
    (contents / "bin/tool").write_text("#!/bin/sh\n")


@pytest.fixture
def tree(tmp_path: Path) -> tuple[Path, str]:
    """A folder as it was unpacked, and its digest."""
    folder = tmp_path / "cache/tool"
    assemble(folder, fill, None)
    return folder, tree_digest(folder)


def test_folder_that_was_not_touched_is_used_again(tree: tuple[Path, str]) -> None:
    folder, digest = tree
    bytecode = folder / "bin/__pycache__/module.cpython-311.pyc"
    bytecode.parent.mkdir()
    bytecode.write_bytes(b"written by Python when it ran")
    assemble(folder, fill, digest)


@pytest.mark.parametrize("name", ["bin/tool", "json.py", "bin/__pycache__/json.py"])
def test_file_that_was_changed_or_added_is_not_run(tree: tuple[Path, str], name: str) -> None:
    folder, digest = tree
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("planted")
    with pytest.raises(EnvironmentMissingError, match=f"expected sha256 {digest}, found .*; delete it to fetch"):
        assemble(folder, fill, digest)


def test_link_that_was_put_in_place_of_a_file_is_not_followed(tree: tuple[Path, str], tmp_path: Path) -> None:
    folder, digest = tree
    (folder / "bin/tool").rename(tmp_path / "tool")
    (folder / "bin/tool").symlink_to(tmp_path / "tool")
    with pytest.raises(EnvironmentMissingError, match="does not hold what was unpacked"):
        assemble(folder, fill, digest)


@pytest.mark.parametrize("name", [".", "bin"])
def test_folder_that_others_can_write_to_is_not_used(tree: tuple[Path, str], name: str) -> None:
    folder, digest = tree
    assert (folder / name).stat().st_mode & 0o022 == 0, "not even under the umask of this test"
    (folder / name).chmod(0o775)
    with pytest.raises(EnvironmentMissingError, match="can be written by others"):
        assemble(folder, fill, digest)


def test_what_was_unpacked_wrongly_is_refused_the_first_time_too(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissingError, match="does not hold what was unpacked"):
        assemble(tmp_path / "tool", fill, "0" * 64)


def test_every_python_that_the_bundled_server_knows_has_its_digest() -> None:
    last = server_tree.LAST_PYTHON[1]
    assert list(server_tree.TREE_DIGESTS) == [f"3.{minor}" for minor in range(11, last + 1)]
    assert len(server_tree.NUMPY.sha256) == len(server_tree.TREE_DIGESTS)
