"""Files that are not what their name says, and what a message calls them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dspark_trt.checkpoints import opening
from dspark_trt.checkpoints.drafter import read_drafter_spec
from dspark_trt.checkpoints.target import read_target, read_target_spec
from dspark_trt.errors import CheckpointError
from tests.support.factories import write_drafter, write_target

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pointer_of_git_lfs_is_called_one(name: str, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    (folder / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer.*git lfs pull.*hf download"):
        read_target(str(folder))


def test_pointer_in_the_place_of_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text(POINTER)
    with pytest.raises(CheckpointError, match="is a Git LFS pointer"):
        read_target(str(tmp_path / "model.gguf"))


def test_file_that_may_not_be_read_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_target(tmp_path / "target")
    if os.geteuid() == 0:  # root may read everything
        monkeypatch.setattr(opening.Path, "open", refuse)
    else:
        (folder / "config.json").chmod(0)
    with pytest.raises(
        CheckpointError, match=r"config\.json cannot be read \(Permission denied\); give this user the right"
    ):
        read_target(str(folder))


def refuse(path: Path, mode: str) -> None:
    raise PermissionError(13, "Permission denied", str(path))


def test_architecture_that_is_no_list_is_not_spelled_letter_by_letter(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    drafter = write_drafter(tmp_path / "drafter", target, config_extra={"architectures": "FalconForCausalLM"})
    of_target = read_target_spec(str(target))
    with pytest.raises(CheckpointError, match=r"the format FalconForCausalLM"):
        read_drafter_spec(str(drafter), of_target)


def test_expected_values_of_a_key_read_as_a_sentence(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"hidden_act": "gelu"}))
    with pytest.raises(CheckpointError, match=r"\(expected 'silu', 'swish' or no such key\)"):
        read_target_spec(str(folder))


def test_value_of_a_megabyte_is_abridged(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"hidden_size": "x" * 1_000_000}))
    with pytest.raises(CheckpointError, match="hidden_size") as caught:
        read_target_spec(str(folder))
    assert len(str(caught.value)) < 600
