"""Quantised weights: the formats that the operators read, and how far they are from float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from dspark_trt.contract import bindings
from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.graphs.quantize import BLOCK_SIZE, quantisation, quantize_blocks, quantize_rows
from tests.engine.test_onnxruntime_drafter import Contexts
from tests.support.conversations import Conversations, open_pair, open_target, read_pair
from tests.support.factories import write_drafter, write_target

LIMITS = EngineLimits(max_requests=4, max_seq_len=64, max_batch_tokens=64)


def dequantize(blocks: NDArray[np.uint8], scales: NDArray[np.float32], bits: int, columns: int) -> NDArray[Any]:
    integers = np.stack([blocks & 15, blocks >> 4], axis=-1) if bits == 4 else blocks
    values = (integers.reshape(*scales.shape, BLOCK_SIZE).astype(np.float32) - (1 << (bits - 1))) * scales[..., None]
    return values.reshape(len(blocks), -1)[:, :columns]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 64, 80])
def test_no_weight_is_off_by_more_than_a_step_and_most_by_half(bits: int, columns: int) -> None:
    weight = np.random.default_rng(bits + columns).standard_normal((50, columns)).astype(np.float32)
    weight[3, :32] = 0  # a block without scale
    blocks, scales = quantize_blocks(weight, bits)
    assert blocks.shape == (50, -(-columns // BLOCK_SIZE), BLOCK_SIZE * bits // 8)
    error = np.abs(dequantize(blocks, scales, bits, columns) - weight)
    step = np.abs(np.repeat(scales, BLOCK_SIZE, axis=1)[:, :columns])
    # the range ends one step earlier on the side away from the largest magnitude
    assert (error <= step * 1.001).all()
    assert (error <= step * 0.501).mean() > 0.98
    assert (error[3, :32] == 0).all()


def rounded(weight: NDArray[Any], kind: Any) -> NDArray[Any]:
    if kind == "rows":
        integers, scales = quantize_rows(weight)
        return np.ascontiguousarray(integers.T * scales[:, None], np.float32)
    return dequantize(*quantize_blocks(weight, kind), kind, weight.shape[1])


def write_rounded(source: Path, folder: Path, precision: Precision) -> Path:
    """The same checkpoint with the weights that the quantised graph stands for, in float32."""
    bits = quantisation(precision)
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        kind = bits.target_layers if "_proj.weight" in name else bits.head if name == "lm_head.weight" else None
        if kind is not None:
            tensors[name] = rounded(weight, kind)
    folder.mkdir()
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("precision", "mean_of_weights"), [("int8", 0.2), ("int4", 2.0)])
def test_a_quantised_target_computes_with_the_rounded_weights(
    precision: Precision, mean_of_weights: float, tmp_path: Path
) -> None:
    """Logits have a standard deviation of about 3. Against the rounded weights only eight-bit activations remain;
    bounds are twice what was seen."""
    source = write_target(tmp_path / "target", hidden=128, intermediate=256, heads=4, biases=True)
    folder = write_rounded(source, tmp_path / "rounded", precision)
    float32 = open_target(folder, tmp_path / "graphs", limits=LIMITS)
    exact = open_target(source, tmp_path / "fp32", limits=LIMITS)
    quantised = open_target(source, tmp_path / precision, limits=LIMITS, precision=precision)
    step = Conversations(num_rows=4, vocab_size=97).step([0, 1, 2], [6, 4, 9], num_decode=2)
    logits = quantised.forward(step.batch).logits
    assert np.abs(float32.forward(step.batch).logits - logits).mean() < 0.12
    assert 0 < np.abs(exact.forward(step.batch).logits - logits).mean() < mean_of_weights


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_quantised_pair_drafts_near_the_float32_one(precision: Precision, tmp_path: Path) -> None:
    target_folder = write_target(tmp_path / "target", hidden=128, intermediate=256, tied=True)
    target, drafter = read_pair(target_folder, write_drafter(tmp_path / "drafter", target_folder))
    _, exact = open_pair(target, drafter, tmp_path / "fp32", limits=LIMITS)
    form = DrafterForm("int8")
    _, quantised = open_pair(target, drafter, tmp_path / precision, limits=LIMITS, precision=precision, form=form)
    contexts = Contexts(exact, quantised, tap_width=2 * 128)
    contexts.ingest([2, 0], [9, 4])
    # slot 1 only: later ones may follow another token
    expected, output = (outputs.draft_logits[:, 0] for outputs in contexts.draft([0, 2]))
    assert 0 < np.abs(expected - output).mean() < 0.2


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_what_is_quantised_is_what_the_page_says(precision: Precision, tmp_path: Path) -> None:
    target_folder = write_target(tmp_path / "target", hidden=64, intermediate=128)
    target, drafter = read_pair(target_folder, write_drafter(tmp_path / "drafter", target_folder, head_type="gated"))
    form = DrafterForm("int8" if precision == "int8" else "fp32")
    open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS, precision=precision, form=form)
    bits = quantisation(precision, form.precision)
    for graph, layer_bits in (
        (bindings.TARGET_GRAPH, bits.target_layers),
        (bindings.INGEST_GRAPH, bits.drafter_layers),
        (bindings.DRAFT_GRAPH, bits.drafter_layers),
    ):
        model = onnx.load(tmp_path / "graphs" / graph, load_external_data=False)
        names = {t.name for t in model.graph.initializer}
        quantised = {name for name in names if ".int" in name or ".rows" in name}
        linears = {name for name in names if "_proj.weight" in name and "layers." in name}
        if layer_bits is None:
            assert not quantised & linears
        else:
            assert all(f".{layer_bits if layer_bits == 'rows' else f'int{layer_bits}'}" in name for name in linears)
        for name in ("embed_tokens.weight", "target.embed_tokens.weight", "fc.weight", "norm.weight"):
            assert not any(other.startswith((f"{name}.int", f"{name}.rows")) for other in quantised)
        assert not any("markov_head" in name or "confidence_head" in name for name in quantised)
