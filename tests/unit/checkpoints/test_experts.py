"""Mixtures of experts: both layouts give the same stacks, and what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_trt.checkpoints.spec import ExpertsSpec
from dspark_trt.checkpoints.target import read_target, read_target_spec
from dspark_trt.errors import CheckpointError
from tests.support.transformers_targets import change_config, write_by_transformers

QWEN: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def write(folder: Path, **more: Any) -> Path:
    return write_by_transformers(folder, "qwen3_moe", num_hidden_layers=2, **(QWEN | more))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_both_layouts_are_the_same_checkpoint(family: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_local_experts": 4} if family == "mixtral" else QWEN
    folders = [
        write_by_transformers(tmp_path / str(in_stacks), family, in_stacks=in_stacks, num_hidden_layers=2, **options)
        for in_stacks in (False, True)
    ]
    stored = [set(load_file(folder / "model.safetensors")) for folder in folders]
    assert any(name.endswith("experts.gate_up_proj") for name in stored[1])
    assert not any("gate_up" in name for name in stored[0])
    one, other = (read_target(str(folder)) for folder in folders)
    assert one.spec == other.spec
    assert one.weights.names() == other.weights.names()
    for name in one.weights.names():
        np.testing.assert_array_equal(one.weights.array(name), other.weights.array(name), err_msg=name)


def test_rows_of_gate_and_up_stand_in_turn(tmp_path: Path) -> None:
    folder = write(tmp_path)
    tensors, weights = load_file(folder / "model.safetensors"), read_target(str(folder)).weights
    stack = weights.array("layers.1.mlp.experts.gate_up.weight")
    assert weights.info("layers.1.mlp.experts.gate_up.weight").shape == stack.shape == (4, 48, 32)
    expert = "model.layers.1.mlp.experts.3"
    np.testing.assert_array_equal(stack[3, 0::2], tensors[f"{expert}.gate_proj.weight"])
    np.testing.assert_array_equal(stack[3, 1::2], tensors[f"{expert}.up_proj.weight"])
    down = weights.array("layers.1.mlp.experts.down.weight")
    np.testing.assert_array_equal(down[3], tensors[f"{expert}.down_proj.weight"])


@pytest.mark.parametrize(
    ("extra", "layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"mlp_only_layers": [0, 3]}, (1, 2)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
    ],
)
def test_layers_with_experts(tmp_path: Path, extra: dict[str, Any], layers: tuple[int, ...]) -> None:
    folder = write_by_transformers(tmp_path, "qwen3_moe", **QWEN, **extra)
    assert read_target(str(folder)).spec.decoder.experts == ExpertsSpec(layers, 4, 2, 24, False)


def test_no_layer_with_experts_is_a_dense_model(tmp_path: Path) -> None:
    folder = write(tmp_path, mlp_only_layers=[0, 1])
    checkpoint = read_target(str(folder))
    assert checkpoint.spec.decoder.experts is None
    assert "layers.1.mlp.up_proj.weight" in checkpoint.weights.names()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_experts": 5, "num_local_experts": 4}, "num_experts = 5 and num_local_experts = 4: expected one number"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than the 4 experts"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step.*found 0"),
        ({"num_local_experts": 10**9}, "num_local_experts.*found 1000000000"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5 is not implemented"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not implemented"),
    ],
)
def test_configurations_that_leave_the_mixture_open_are_refused(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    folder = change_config(write(tmp_path), **extra)
    with pytest.raises(CheckpointError, match=message):
        read_target_spec(str(folder))


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "missing": (lambda weight: None, f"{EXPERT.removeprefix('model.')} is missing"),
    "of another shape": (lambda weight: np.ascontiguousarray(weight.T), r"shape \[32, 24\].*expected \[24, 32\]"),
    "of another type": (lambda weight: weight.astype(np.float16), "type float16, expected .*float32"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_expert_that_does_not_fit_is_named(tmp_path: Path, damage: str) -> None:
    folder = write(tmp_path)
    change, message = DAMAGES[damage]
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(EXPERT))
    save_file(tensors if changed is None else tensors | {EXPERT: changed}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_target(str(folder))
