"""Quantised targets: every format gives the very numbers that its integers and scales stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file

from dspark_trt.checkpoints.target import read_target, read_target_spec
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import CheckpointError
from tests.support import quantised_checkpoints as forms
from tests.support.conversations import Conversations, TransformersTarget, expected_outputs, open_target
from tests.support.factories import write_target
from tests.support.transformers_targets import write_by_transformers

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BLOCKS: dict[str, Any] = FP8 | {"weight_block_size": [128, 128]}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return config | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


OF_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 128]}
CASES: dict[str, tuple[dict[str, Any], forms.Writer]] = {
    "fp8 in blocks": (BLOCKS, forms.fp8(block=(128, 128), scale="weight_scale_inv")),
    "fp8 in blocks, bf16 scales": (
        BLOCKS,
        forms.fp8(block=(128, 128), scale="weight_scale_inv", dtype=torch.bfloat16),
    ),
    "fp8 with one scale": (
        FP8 | {"weight_block_size": None, "activation_scheme": "static"},
        forms.fp8(block=None, scale="weight_scale_inv", activation_scale=0.5),
    ),
    "compressed fp8 by tensor": (
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        forms.fp8(block=None, scale="weight_scale", input_scale=0.5),
    ),
    "compressed fp8 by channel": (compressed("float-quantized", strategy="channel"), forms.fp8_channels),
    "compressed fp8 in blocks": (
        compressed("float-quantized", **OF_BLOCKS),
        forms.fp8(block=(64, 128), scale="weight_scale"),
    ),
    "compressed int8": (compressed("int-quantized", num_bits=8), forms.int8_channels(symmetric=True)),
    "compressed int8, zero points": (compressed("int-quantized", num_bits=8), forms.int8_channels(symmetric=False)),
    "packed int4 in groups": (compressed("pack-quantized", num_bits=4, group_size=32), forms.packed()),
    "packed int4, zero points": (compressed("pack-quantized", num_bits=4), forms.packed(symmetric=False)),
    "packed int4 by channel": (compressed("pack-quantized", num_bits=4), forms.packed(size=None)),
    "packed int4, inputs in any group": (
        compressed("pack-quantized", num_bits=4),
        forms.packed(symmetric=False, shuffled=True),
    ),
    "packed int8": (compressed("pack-quantized", num_bits=8), forms.packed(bits=8, symmetric=False)),
    "gptq": (GPTQ, forms.gptq()),
    "gptq, biases of zeros": (GPTQ, forms.gptq(bias=True)),
    "gptq without g_idx": (GPTQ | {"checkpoint_format": "gptq"}, forms.gptq(index="absent")),
    "gptq with desc_act": (GPTQ | {"desc_act": True}, forms.gptq(index="shuffled")),
    "gptq in one group": (GPTQ | {"group_size": -1}, forms.gptq(size=-1)),
    "gptq of 8 bits": (GPTQ | {"bits": 8}, forms.gptq(bits=8)),
    "gptq of the second form": (GPTQ | {"checkpoint_format": "gptq_v2"}, forms.gptq(first=False)),
    "awq": (AWQ, forms.awq),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that are no multiple of a block, nor of each other."""
    return write_target(
        tmp_path_factory.mktemp("source"), family="qwen3", layers=2, hidden=160, intermediate=192, head_dim=40
    )


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_their_integers_and_scales_stand_for(
    case: str, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, writer = CASES[case]
    plain = read_target(str(forms.write_quantised(tmp_path / "target", source, config, writer)))
    caplog.clear()
    found = read_target(str(tmp_path / "target"))
    assert found.spec == plain.spec
    assert found.weights.names() == plain.weights.names()
    for name in plain.weights.names():
        np.testing.assert_array_equal(found.weights.array(name), plain.weights.array(name), err_msg=name)
        assert found.weights.info(name).shape == plain.weights.info(name).shape
    assert "activations and KV are not quantised" in caplog.text
    assert read_target_spec(str(tmp_path / "target")) == plain.spec


def test_outputs_and_inputs_that_fill_no_word(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source", layers=1, heads=2, kv_heads=1, head_dim=6)
    config, writer = compressed("pack-quantized", num_bits=4), forms.packed(size=None, symmetric=False)
    plain = read_target(str(forms.write_quantised(tmp_path / "target", source, config, writer))).weights
    found = read_target(str(tmp_path / "target")).weights
    for name, shape in (("layers.0.self_attn.k_proj.weight", (6, 32)), ("layers.0.self_attn.o_proj.weight", (32, 12))):
        assert plain.info(name).shape == shape
        np.testing.assert_array_equal(found.array(name), plain.array(name))


@pytest.mark.parametrize("case", ["fp8 in blocks", "gptq with desc_act", "awq"])
def test_logits_are_those_of_the_dequantised_model_in_transformers(case: str, source: Path, tmp_path: Path) -> None:
    plain = forms.write_quantised(tmp_path / "target", source, *CASES[case])
    limits = EngineLimits(max_requests=3, max_seq_len=64, max_batch_tokens=64)
    engine, model = open_target(tmp_path / "target", tmp_path / "graphs", limits=limits), TransformersTarget(plain)
    rows = Conversations(num_rows=limits.max_requests, vocab_size=97)
    for _ in range(3):
        step = rows.random_step(max_query=9)
        np.testing.assert_allclose(engine.forward(step.batch).logits, expected_outputs(model, step, (0,))[0], atol=1e-4)
        rows.commit(step, rows.random_acceptance(step))


def test_a_block_larger_than_any_matrix_takes_no_memory(source: Path, tmp_path: Path) -> None:
    config = BLOCKS | {"weight_block_size": [1 << 40, 128]}
    writer = forms.fp8(block=(1 << 40, 128), scale="weight_scale_inv")
    plain = read_target(str(forms.write_quantised(tmp_path / "target", source, config, writer))).weights
    found, name = read_target(str(tmp_path / "target")).weights, "layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(found.array(name), plain.array(name))


def test_experts_are_dequantised_one_by_one(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_experts": 3, "moe_intermediate_size": 24}
    source = write_by_transformers(tmp_path / "source", "qwen3_moe", num_experts_per_tok=2, **sizes)
    plain = read_target(str(forms.write_quantised(tmp_path / "target", source, *CASES["fp8 in blocks"]))).weights
    found = read_target(str(tmp_path / "target")).weights
    for name in plain.names():
        np.testing.assert_array_equal(found.array(name), plain.array(name), err_msg=name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes' are not supported"),
        ({"quant_method": "modelopt"}, "quantised by 'modelopt' are not supported"),
        ({"quant_method": "mxfp4"}, "quantised by 'mxfp4' are not supported"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2' are not supported"),
        (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0' are not supported"),
        (FP8 | {"weight_block_size": 128}, "weight_block_size = 128, expected two numbers"),
        (compressed("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' are not supported"),
        (compressed("marlin-24"), "format 'marlin-24' are not supported"),
        (compressed("int-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (compressed("int-quantized") | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config rotates"),
        (compressed("int-quantized") | {"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
        (compressed("float-quantized", block_structure=[[1], [2]]), "block_structure: expected one pair of numbers"),
        (compressed("float-quantized", block_structure=[128]), "block_structure: expected one pair of numbers"),
        (GPTQ | {"bits": 3}, "GPTQ weights of 3 bits are not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' are not supported"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic gives some modules other bits"),
        (GPTQ | {"group_size": 0}, "group_size = 0"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"bits": 8}, "bits 8"),
    ],
)
def test_other_formats_are_refused_by_name_before_a_weight_is_read(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_target(tmp_path, config_extra={"quantization_config": config})
    with pytest.raises(CheckpointError, match=message):
        read_target_spec(str(folder))


def test_plain_weights_under_a_quantised_configuration_are_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path, config_extra={"quantization_config": GPTQ})
    with pytest.raises(CheckpointError, match="in GPTQ form, but no tensor is"):
        read_target(str(folder))


def test_quantised_weights_under_a_plain_configuration_are_refused_by_name(source: Path, tmp_path: Path) -> None:
    forms.write_quantised(tmp_path / "target", source, *CASES["gptq"])
    values = json.loads((tmp_path / "target/config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "target/config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="those of weights in GPTQ form"):
        read_target(str(tmp_path / "target"))


MODULE = "model.layers.1.mlp.down_proj."
DAMAGES: list[tuple[str, str, Any, str]] = [  # case, tensor, its new content, message
    ("gptq", "qzeros", None, r"down_proj\.qzeros is missing"),
    ("gptq", "scales", torch.ones(3, 160), r"down_proj\.scales has shape \[3, 160\], expected \[6, 160\]"),
    ("gptq", "g_idx", torch.full((192,), 6, dtype=torch.int32), "g_idx has groups from 6 to 6, expected 0 to 5"),
    ("gptq", "qzeros", torch.full((6, 20), -1, dtype=torch.int32), "loaders of checkpoint_format 'gptq' read"),
    ("awq", "qzeros", torch.zeros(3, 20, dtype=torch.int32), r"expected \[6, 20\] with group_size 32"),
    ("fp8 in blocks", "weight_scale_inv", torch.ones(3, 2), r"has shape \[3, 2\], expected one scale or one for each"),
    ("fp8 in blocks", "weight", torch.ones(160, 192), r"has element type float32, expected F8_E4M3"),
    ("packed int4 in groups", "weight_shape", torch.tensor([160, 100]), r"weight_packed has shape \[160, 24\]"),
    ("packed int4 in groups", "weight_scale", torch.ones(160, 7), "one for each output, block or group"),
    ("packed int4, inputs in any group", "weight_g_idx", torch.full((192,), 9), "has a group beyond the 6"),
]


@pytest.mark.parametrize(("case", "part", "content", "message"), DAMAGES, ids=[f"{c}: {m}" for c, _, _, m in DAMAGES])
def test_parts_that_do_not_fit_together_are_named(
    case: str, part: str, content: torch.Tensor | None, message: str, source: Path, tmp_path: Path
) -> None:
    forms.write_quantised(tmp_path / "target", source, *CASES[case])
    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    del tensors[MODULE + part]
    save_file(tensors if content is None else tensors | {MODULE + part: content}, file)
    with pytest.raises(CheckpointError, match=message):
        read_target(str(file.parent)).weights.array("layers.1.mlp.down_proj.weight")


def test_a_bias_of_old_exports_that_is_not_zero_is_refused(source: Path, tmp_path: Path) -> None:
    forms.write_quantised(tmp_path / "target", source, *CASES["gptq, biases of zeros"])
    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    tensors[MODULE + "bias"][3] = 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"down_proj\.bias with shape \[160\] is not expected"):
        read_target(str(file.parent))


def test_checkpoints_here_are_as_random_as_they_look(source: Path, tmp_path: Path) -> None:
    """Guards the guard: an expected weight of zeros would let any reader pass."""
    plain = forms.write_quantised(tmp_path / "target", source, *CASES["awq"])
    for name, array in load_arrays(plain / "model.safetensors").items():
        assert np.count_nonzero(array) > 0.8 * array.size, name
