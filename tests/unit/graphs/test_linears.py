"""Linear layers by rows: what the graph computes, number for number, and how few nodes it takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.bindings import Binding
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.linears import Linears
from dspark_trt.graphs.quantize import largest_integer, low_step, quantize_rows
from dspark_trt.graphs.weights import WeightFolder
from tests.support.factories import write_target

GATE, UP = "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"
Floats = NDArray[np.float32]


def outputs(folder: Path, x: Floats, *, wide_inputs: tuple[str, ...] = ()) -> tuple[list[Any], Counter[str]]:
    """Of two layers that read the same, and the nodes of the graph by type."""
    builder = GraphBuilder("rows")
    builder.input(Binding("x", "float32", ("T", x.shape[1])))
    checkpoint = read_target(str(write_target(folder / "target", hidden=64, intermediate=80)))
    with WeightFolder(folder, "rows", checkpoint.weights) as weights:
        linear = Linears(builder, weights, "rows", "float32", wide_inputs=wide_inputs)
        for name, weight in {"gate": GATE, "up": UP}.items():
            linear("x", weight, output=builder.output(Binding(name, "float32", ("T", 80))))
        builder.save(folder / "rows.onnx", {})
    nodes = Counter(node.op_type for node in onnx.load(folder / "rows.onnx", load_external_data=False).graph.node)
    session = onnxruntime.InferenceSession(folder / "rows.onnx", providers=["CPUExecutionProvider"])
    return session.run(["gate", "up"], {"x": x}), nodes


def expected(folder: Path, x: Floats, weight: str, *, is_wide: bool) -> Floats:
    """In integers, with the few float32 operations around them in the graph's order."""
    integers, scales = quantize_rows(read_target(str(folder / "target")).weights.array(weight))
    scale = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-12)) / np.float32(largest_integer())
    high = np.rint(x / scale)
    product = (high.astype(np.int64) @ integers.astype(np.int64)).astype(np.float32) * scales
    if is_wide:
        low = np.rint((x / scale - high) / np.float32(low_step()))
        product += (
            (low.astype(np.int64) @ integers.astype(np.int64)).astype(np.float32) * scales * np.float32(low_step())
        )
    return product * scale


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33])
def test_products_are_those_of_integers(num_tokens: int, tmp_path: Path) -> None:
    x = np.random.default_rng(num_tokens).standard_normal((num_tokens, 64)).astype(np.float32)
    x[0, :3] = 127, 0.5, 1.5  # halves go to even
    x[-1] *= 1e4
    found, _ = outputs(tmp_path, x, wide_inputs=(UP,))
    np.testing.assert_array_equal(found[0], expected(tmp_path, x, GATE, is_wide=False))
    np.testing.assert_array_equal(found[1], expected(tmp_path, x, UP, is_wide=True))


def test_a_row_of_zeros_and_no_rows_at_all(tmp_path: Path) -> None:
    found, _ = outputs(tmp_path, np.zeros((2, 64), np.float32), wide_inputs=(UP,))
    for each in found:
        np.testing.assert_array_equal(each, np.zeros((2, 80)))
    none, _ = outputs(tmp_path, np.empty((0, 64), np.float32), wide_inputs=(UP,))
    assert [each.shape for each in none] == [(0, 80)] * 2


def test_layers_that_read_the_same_quantise_it_once(tmp_path: Path) -> None:
    _, nodes = outputs(tmp_path, np.ones((2, 64), np.float32))
    assert nodes == {
        **dict.fromkeys(("Abs", "ReduceMax", "Max", "QuantizeLinear"), 1),
        **dict.fromkeys(("Div", "Mul", "MatMulIntegerToFloat"), 2),
    }
