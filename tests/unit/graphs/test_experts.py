"""The forms of a mixture of experts against a float64 one in numpy, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import ExpertsSpec, TensorInfo
from dspark_trt.contract.bindings import Binding
from dspark_trt.errors import ExportError
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.experts import Experts
from dspark_trt.graphs.numbers import Numbers
from dspark_trt.graphs.quantize import BLOCK_SIZE, LinearBits, quantize_blocks
from dspark_trt.graphs.weights import WeightFolder

HIDDEN, INNER, SHARED = 64, 96, 32
LAYER = "layers.0.mlp"
Weights = dict[str, NDArray[np.float32]]


class Store:
    """Weights in memory."""

    def __init__(self, arrays: Weights) -> None:
        self._arrays = arrays

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._arrays))

    def info(self, name: str) -> TensorInfo:
        return TensorInfo("float32", self._arrays[name].shape)

    def array(self, name: str) -> NDArray[Any]:
        return self._arrays[name]


def make_weights(spec: ExpertsSpec, hidden: int = HIDDEN) -> Weights:
    random = np.random.default_rng(4)
    shapes = {
        "gate.weight": (spec.num_experts, hidden),
        "experts.gate_up.weight": (spec.num_experts, 2 * spec.intermediate_size, hidden),
        "experts.down.weight": (spec.num_experts, hidden, spec.intermediate_size),
    }
    if spec.shared_intermediate_size is not None:
        shared = spec.shared_intermediate_size
        shapes |= {f"shared_expert.{each}_proj.weight": (shared, hidden) for each in ("gate", "up")}
        shapes |= {"shared_expert.down_proj.weight": (hidden, shared), "shared_expert_gate.weight": (1, hidden)}
    return {
        f"{LAYER}.{name}": (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def expected_outputs(spec: ExpertsSpec, weights: Weights, x: NDArray[np.float32]) -> NDArray[np.float64]:
    def linear(name: str, vector: NDArray[Any], expert: int | None = None) -> NDArray[np.float64]:
        weight = weights[f"{LAYER}.{name}.weight"].astype(np.float64)
        return (weight if expert is None else weight[expert]) @ vector

    def silu(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values / (1 + np.exp(-values))

    outputs = np.zeros(x.shape)
    for token, vector in enumerate(x.astype(np.float64)):
        odds = np.exp(linear("gate", vector))
        odds /= odds.sum()
        chosen = np.argsort(-odds)[: spec.num_active]
        total = odds[chosen].sum() if spec.is_normalised else 1.0
        for expert in chosen:
            both = linear("experts.gate_up", vector, expert)
            outputs[token] += odds[expert] / total * linear("experts.down", silu(both[::2]) * both[1::2], expert)
        if spec.shared_intermediate_size is not None:
            hidden = silu(linear("shared_expert.gate_proj", vector)) * linear("shared_expert.up_proj", vector)
            openness = 1 / (1 + np.exp(-linear("shared_expert_gate", vector)))
            outputs[token] += openness * linear("shared_expert.down_proj", hidden)
    return outputs


def run(spec: ExpertsSpec, weights: Weights, folder: Path, x: NDArray[Any], *, is_plain: bool, bits: LinearBits) -> Any:
    builder = GraphBuilder("experts")
    builder.input(Binding("x", "float32", ("T", x.shape[1])))
    builder.output(Binding("y", "float32", ("T", x.shape[1])))
    with WeightFolder(folder, "target", Store(weights)) as source:
        attention = "standard" if is_plain else "gqa"
        experts = Experts(builder, spec, source, Numbers(), bits=bits, attention=attention)
        builder.op("Identity", experts.mlp(0, "x"), output="y")
        builder.save(folder / "experts.onnx", {})
    session = onnxruntime.InferenceSession(folder / "experts.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def dequantised(weights: Weights, bits: int) -> Weights:
    """The experts as their blocks hold them; the rest as it is."""
    found = dict(weights)
    for name in (f"{LAYER}.experts.gate_up.weight", f"{LAYER}.experts.down.weight"):
        values = []
        for matrix in weights[name]:
            blocks, scales = quantize_blocks(matrix, bits)
            if bits == 4:
                blocks = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], BLOCK_SIZE)
            values.append(((blocks.astype(np.float32) - 2 ** (bits - 1)) * scales[..., None]).reshape(matrix.shape))
        found[name] = np.stack(values)
    return found


SPECS = {
    "normalised": ExpertsSpec((0,), 8, 3, INNER, True),
    "as they are": ExpertsSpec((0,), 8, 3, INNER, False),
    "one of two": ExpertsSpec((0,), 2, 1, INNER, False),
    "all": ExpertsSpec((0,), 3, 3, INNER, False),
}
SHARED_SPEC = ExpertsSpec((0,), 5, 2, INNER, False, SHARED)


@pytest.mark.parametrize("is_plain", [False, True], ids=["operator", "plain"])
@pytest.mark.parametrize("spec", [*SPECS.values(), SHARED_SPEC], ids=[*SPECS, "shared"])
def test_tokens_get_the_experts_of_their_largest_probabilities(
    spec: ExpertsSpec, is_plain: bool, tmp_path: Path
) -> None:
    weights = make_weights(spec)
    x = np.random.default_rng(1).standard_normal((9, HIDDEN)).astype(np.float32)
    found = run(spec, weights, tmp_path, x, is_plain=is_plain, bits=None)
    np.testing.assert_allclose(found, expected_outputs(spec, weights, x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_quantised_experts_compute_with_what_their_blocks_hold(spec: ExpertsSpec, bits: Any, tmp_path: Path) -> None:
    """Activations are float32 beside four bits; beside eight they have eight bits too."""
    weights = make_weights(spec)
    x = np.random.default_rng(1).standard_normal((9, HIDDEN)).astype(np.float32)
    found = run(spec, weights, tmp_path, x, is_plain=False, bits=bits)
    expected = expected_outputs(spec, dequantised(weights, bits), x)
    np.testing.assert_allclose(found, expected, atol={4: 1e-5, 8: 0.03}[bits], rtol=0)


def test_no_tokens_are_no_outputs(tmp_path: Path) -> None:
    spec, nothing = SPECS["normalised"], np.empty((0, HIDDEN), np.float32)
    assert run(spec, make_weights(spec), tmp_path, nothing, is_plain=False, bits=None).shape == (0, HIDDEN)


def test_experts_whose_rows_are_no_whole_blocks_are_refused_in_few_bits(tmp_path: Path) -> None:
    spec = ExpertsSpec((0,), 2, 1, 40, True)
    with pytest.raises(ExportError, match=r"multiple of 32, found .*choose --precision fp32"):
        run(spec, make_weights(spec), tmp_path, np.zeros((1, HIDDEN), np.float32), is_plain=False, bits=4)
