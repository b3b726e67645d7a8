"""The choice of activations of sixteen bits: by what eight bits do to the logits, one activation at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_trt.building.activation_bits import Reference, activation_of, choose, most_within
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.onnxruntime.switched import SwitchedTargetEngine
from dspark_trt.graphs.quantize import low_step
from dspark_trt.graphs.target import write_switched_graph
from dspark_trt.machine import cpu
from tests.support.conversations import GAMMA, SETTINGS, Conversations, open_target
from tests.support.factories import write_target

LIMITS = EngineLimits(max_requests=2, max_seq_len=64, max_batch_tokens=64)


def switched(source: Path, folder: Path) -> tuple[SwitchedTargetEngine, tuple[str, ...]]:
    folder.mkdir()
    layers = write_switched_graph(read_target(str(source)), folder, limits=LIMITS, gamma=GAMMA)
    return SwitchedTargetEngine(folder, len(layers), SETTINGS), layers


def with_an_outlier(source: Path) -> Path:
    """The same function, but for rounding: one number between the matrices of layer 1's MLP is a thousandfold."""
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3] *= 1000
    tensors["model.layers.1.mlp.down_proj.weight"][:, 3] /= 1000
    save_file(tensors, source / "model.safetensors")
    return source


def test_an_outlier_gets_sixteen_bits_and_what_is_harmless_does_not(tmp_path: Path) -> None:
    source = with_an_outlier(write_target(tmp_path / "target", layers=3, hidden=64, intermediate=96))
    texts = [np.random.default_rng(seed).integers(0, 97, 40) for seed in range(2)]
    reference = Reference(texts, open_target(source, tmp_path / "exact", limits=LIMITS))
    engine, layers = switched(source, tmp_path / "switched")
    choice = choose(layers, engine, reference)
    assert "layer 1, MLP middle" in choice.wide
    assert "layers.1.mlp.down_proj.weight" in choice.wide_inputs
    assert len(choice.wide_inputs) < choice.num_layers == len(layers) == 3 * 7 + 1
    engine.low_steps = np.where(np.isin(layers, choice.wide_inputs), low_step(), 0).astype(np.float32)
    found = reference.distance(engine)
    assert found.kl < 0.5 * choice.eight_everywhere.kl
    assert found.kl <= 1.501 * choice.sixteen_everywhere.kl


def test_a_switched_target_has_exactly_the_logits_of_either_form(tmp_path: Path) -> None:
    source = write_target(tmp_path / "target", layers=2)
    engine, layers = switched(source, tmp_path / "switched")
    step = Conversations(num_rows=2, vocab_size=97).step([0, 1], [9, 4], num_decode=1)
    for name, wide in {"eight": (), "sixteen": layers, "some": layers[3:9]}.items():
        written = open_target(source, tmp_path / name, limits=LIMITS, precision="int8", wide_inputs=wide)
        engine.low_steps = np.where(np.isin(layers, wide), low_step(), 0).astype(np.float32)
        np.testing.assert_array_equal(engine.forward(step.batch).logits, written.forward(step.batch).logits)


@pytest.mark.parametrize(("allowed", "most"), [(0.0, 0), (1.0, 1), (24.9, 4), (100.0, 10), (1e9, 10)])
def test_as_many_get_eight_bits_as_are_within_the_limit_together(allowed: float, most: int) -> None:
    asked = []

    def kl_of(count: int) -> float:
        asked.append(count)
        return float(count**2)

    assert most_within(10, allowed, kl_of) == most
    assert len(asked) <= 4


def test_layers_that_read_the_same_are_one_activation() -> None:
    names = [f"layers.12.self_attn.{which}_proj.weight" for which in "qkv"]
    assert {activation_of(name) for name in names} == {"layer 12, attention input"}
    assert activation_of("layers.0.mlp.shared_expert.down_proj.weight") == "layer 0, MLP middle"
    assert activation_of("lm_head.weight") == activation_of("embed_tokens.weight") == "output head"


def test_without_exact_sums_of_byte_products_activations_have_seven_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What saturates pairwise in 16 bits is 255 * 127 twice, and 127 * 127 twice is not."""
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "instruction_sets", lambda: "avx2 fma avx512f")
    assert not cpu.has_exact_byte_products()
    source = write_target(tmp_path / "target")
    step = Conversations(num_rows=2, vocab_size=97).step([0], [9], num_decode=0)
    seven, exact = (
        open_target(source, tmp_path / name, limits=LIMITS, precision=name).forward(step.batch).logits.copy()
        for name in ("int8", "fp32")
    )
    monkeypatch.setattr(cpu, "instruction_sets", lambda: "avx2 fma avx512f avx512_vnni")
    assert cpu.has_exact_byte_products()
    eight = open_target(source, tmp_path / "eight", limits=LIMITS, precision="int8").forward(step.batch).logits
    assert np.abs(seven - eight).max() > 0
    assert np.abs(seven - exact).mean() < 0.1 * np.abs(exact).mean()
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(cpu, "instruction_sets", lambda: "")
    assert cpu.has_exact_byte_products()
