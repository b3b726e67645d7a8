"""Phi-3's fused Linear layers: parts are rows of the whole, in memory and in the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError
from tests.support.transformers_targets import write_by_transformers

QKV = "model.layers.1.self_attn.qkv_proj.weight"


def test_parts_are_rows_of_the_whole_where_they_stand_in_the_file(tmp_path: Path) -> None:
    folder = write_by_transformers(tmp_path, "phi3", num_hidden_layers=2)
    whole, weights = load_file(folder / "model.safetensors")[QKV], read_target(str(folder)).weights
    data = (folder / "model.safetensors").read_bytes()
    for which, rows in (("q", slice(0, 32)), ("k", slice(32, 48)), ("v", slice(48, 64))):
        name = f"layers.1.self_attn.{which}_proj.weight"
        info, array = weights.info(name), weights.array(name)
        np.testing.assert_array_equal(array, whole[rows])
        assert info.shape == array.shape
        assert info.offset is not None
        assert data[info.offset : info.offset + array.nbytes] == array.tobytes()


@pytest.mark.parametrize("change", ["missing", "of another shape"])
def test_a_fused_matrix_that_does_not_fit_is_named(tmp_path: Path, change: str) -> None:
    folder = write_by_transformers(tmp_path, "phi3", num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    whole = tensors.pop(QKV)
    save_file(tensors if change == "missing" else tensors | {QKV: whole[1:]}, folder / "model.safetensors")
    found = "none" if change == "missing" else r"\[63, 32\]"
    with pytest.raises(CheckpointError, match=rf"qkv_proj\.weight: expected shape \[64, 32\], found {found}"):
        read_target(str(folder))
