"""The safetensors store: offsets that hold, and damaged files that are called damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from dspark_trt.checkpoints.safetensors_store import open_safetensors
from dspark_trt.errors import CheckpointError
from tests.support.factories import write_target


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 1), ("float32", 2), ("bfloat16", 1), ("float16", 3)])
def test_file_and_offset_point_at_the_bytes_of_the_tensor(tmp_path: Path, dtype: str, shards: int) -> None:
    store = open_safetensors(write_target(tmp_path, dtype=dtype, shards=shards), str)
    for name in store.names():
        info, array = store.info(name), store.array(name)
        assert info.file is not None
        with info.file.open("rb") as stream:
            stream.seek(info.offset or 0)
            assert stream.read(array.nbytes) == array.tobytes()
        assert (info.dtype, info.shape) == (array.dtype.name, array.shape)


def test_arrays_are_mapped_and_cannot_be_written_to(tmp_path: Path) -> None:
    array = open_safetensors(write_target(tmp_path), str).array("model.norm.weight")
    assert isinstance(array, np.memmap)
    assert not array.flags.writeable


def test_symlinks_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = write_target(tmp_path / "blobs", shards=2), tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    store, plain = open_safetensors(snapshot, str), open_safetensors(blobs, str)
    assert store.names() == plain.names()
    for name in store.names():
        np.testing.assert_array_equal(store.array(name), plain.array(name))
        assert store.info(name).file == snapshot / (plain.info(name).file or snapshot).name


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 200, -1])
def test_truncated_file_is_named_with_what_is_missing(tmp_path: Path, num_bytes: int) -> None:
    file = write_target(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:num_bytes])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: not a complete safetensors file.*download it again"
    ):
        open_safetensors(tmp_path, str)


def test_header_that_is_no_json_is_reported(tmp_path: Path) -> None:
    file = write_target(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:8] + b"x" * (file.stat().st_size - 8))
    with pytest.raises(CheckpointError, match="the header cannot be read"):
        open_safetensors(tmp_path, str)


def test_header_whose_shape_and_size_disagree_is_reported(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(20))
    with pytest.raises(CheckpointError, match=r"tensor w of shape \[2, 3\] and type float32 does not take 20 bytes"):
        open_safetensors(tmp_path, str)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (write_target(tmp_path, shards=3) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names 3 files, model-00002-of-00003\.safetensors is not there"):
        open_safetensors(tmp_path, str)


def test_index_and_shards_must_hold_the_same_tensors(tmp_path: Path) -> None:
    index = write_target(tmp_path, shards=2) / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    del values["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in the files, but not in the index"):
        open_safetensors(tmp_path, str)


def test_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    index = write_target(tmp_path, shards=2) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_safetensors(tmp_path, str)


def test_two_tensors_under_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is there twice"):
        open_safetensors(write_target(tmp_path), lambda name: "same")


def test_other_weight_formats_are_named(tmp_path: Path) -> None:
    (write_target(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin.*save_pretrained"):
        open_safetensors(tmp_path, str)
