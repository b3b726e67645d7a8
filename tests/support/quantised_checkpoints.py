"""Tiny targets with quantised weights, written in the form of each trainer, bit by bit in plain Python.

Integers, scales and zero points are drawn first; what the weight is follows from them, and what is stored is packed
from them. So the expected numbers owe nothing to the reader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Array = NDArray[Any]
Stored = dict[str, torch.Tensor]  # by what follows the module's name
Writer = Callable[[np.random.Generator, int, int], tuple[Stored, Array]]  # outputs, inputs -> stored, weight
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words_of(values: Array, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] small integers -> [n, ceil(m * bits / 32)] int32; the lowest bits hold value `order[0]` of a word's."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows = []
    for row in values.tolist():
        padded = row + [0] * (-len(row) % per_word)
        words = []
        for start in range(0, len(padded), per_word):
            word = sum(padded[start + place] << (bits * at) for at, place in enumerate(order))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def scales_like(random: np.random.Generator, shape: tuple[int, ...], inputs: int) -> Array:
    """Positive, and exactly representable in float16."""
    return (random.integers(4, 12, shape) / 64 / inputs**0.5).astype(np.float16).astype(np.float32)


def gptq(*, bits: int = 4, size: int = 32, first: bool = True, index: str = "plain", bias: bool = False) -> Writer:
    """`index`: g_idx plain, shuffled (desc_act) or absent. `first`: zero points less one."""

    def write(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Stored, Array]:
        groups = 1 if size == -1 else inputs // size
        integers = random.integers(0, 1 << bits, (outputs, inputs))
        zeros = random.integers(1 if first else 0, 1 << bits, (groups, outputs))
        scales = scales_like(random, (groups, outputs), inputs) / (1 << (bits - 3))
        of_input = np.arange(inputs) * groups // inputs
        if index == "shuffled":
            of_input = random.permutation(of_input)
        weight = np.empty((outputs, inputs), np.float32)
        for at, group in enumerate(of_input):
            weight[:, at] = (integers[:, at] - zeros[group]) * scales[group]
        stored = {
            "qweight": words_of(integers, bits).T.contiguous(),
            "qzeros": words_of(zeros - int(first), bits),
            "scales": torch.from_numpy(scales.astype(np.float32)),
        }
        if index != "absent":
            stored["g_idx"] = torch.from_numpy(of_input.astype(np.int32))
        if bias:
            stored["bias"] = torch.zeros(outputs)
        return stored, weight

    return write


def awq(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Stored, Array]:
    integers, zeros = random.integers(0, 16, (outputs, inputs)), random.integers(0, 16, (inputs // 32, outputs))
    scales = scales_like(random, (inputs // 32, outputs), inputs)
    weight = np.empty((outputs, inputs), np.float32)
    for at in range(inputs):
        weight[:, at] = (integers[:, at] - zeros[at // 32]) * scales[at // 32]
    stored = {
        "qweight": words_of(integers.T, 4, AWQ_ORDER),
        "qzeros": words_of(zeros, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales).half(),
    }
    return stored, weight


def _fp8(random: np.random.Generator, outputs: int, inputs: int) -> tuple[torch.Tensor, Array]:
    stored = torch.from_numpy(random.standard_normal((outputs, inputs)) * 40).to(torch.float8_e4m3fn)
    return stored, stored.float().numpy()


def fp8(*, block: tuple[int, int] | None, dtype: torch.dtype = torch.float32, scale: str, **more: Any) -> Writer:
    """float8 with a scale for each block, or one for all. `scale` is how that tensor is called."""

    def write(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Stored, Array]:
        stored, values = _fp8(random, outputs, inputs)
        rows, columns = block or (outputs, inputs)
        scales = scales_like(random, (-(-outputs // rows), -(-inputs // columns)), inputs) / 16
        scales = torch.from_numpy(scales).to(dtype)
        of_each = scales.float().numpy()[np.arange(outputs) // rows][:, np.arange(inputs) // columns]
        of_activations = {name: torch.tensor(value) for name, value in more.items()}
        return {"weight": stored, scale: scales if block else scales.reshape(()), **of_activations}, values * of_each

    return write


def fp8_channels(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Stored, Array]:
    stored, values = _fp8(random, outputs, inputs)
    scales = torch.from_numpy(scales_like(random, (outputs, 1), inputs) / 16).bfloat16()
    return {"weight": stored, "weight_scale": scales}, values * scales.float().numpy()


def int8_channels(*, symmetric: bool) -> Writer:
    def write(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Stored, Array]:
        integers = random.integers(-128, 128, (outputs, inputs))
        zeros = np.zeros((outputs, 1), np.int64) if symmetric else random.integers(-128, 128, (outputs, 1))
        scales = scales_like(random, (outputs, 1), inputs) / 16
        stored = {"weight": torch.from_numpy(integers.astype(np.int8)), "weight_scale": torch.from_numpy(scales)}
        if not symmetric:
            stored["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
        return stored, ((integers - zeros) * scales).astype(np.float32)

    return write


def packed(*, bits: int = 4, size: int | None = 32, symmetric: bool = True, shuffled: bool = False) -> Writer:
    """compressed-tensors' pack-quantized; `size` None: a scale for each output."""

    def write(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Stored, Array]:
        half, groups = 1 << (bits - 1), inputs // (size or inputs)
        integers = random.integers(-half, half, (outputs, inputs))
        zeros = np.zeros((outputs, groups), np.int64) if symmetric else random.integers(-half, half, (outputs, groups))
        scales = scales_like(random, (outputs, groups), inputs) / (1 << (bits - 3))
        of_input = np.arange(inputs) * groups // inputs
        if shuffled:
            of_input = random.permutation(of_input)
        weight = np.empty((outputs, inputs), np.float32)
        for at, group in enumerate(of_input):
            weight[:, at] = (integers[:, at] - zeros[:, group]) * scales[:, group]
        stored = {
            "weight_packed": words_of(integers + half, bits),
            "weight_scale": torch.from_numpy(scales.astype(np.float32)),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            stored["weight_zero_point"] = words_of((zeros + half).T, bits).T.contiguous()
        if shuffled:
            stored["weight_g_idx"] = torch.from_numpy(of_input.astype(np.int32))
        return stored, weight

    return write


def write_quantised(folder: Path, source: Path, config: dict[str, Any], write: Writer, seed: int = 0) -> Path:
    """The target in `source` with other weights in all `*_proj` layers: quantised in `folder`, and plain in `plain`
    beside it, whose path is returned."""
    random, tensors = np.random.default_rng(seed), load_file(source / "model.safetensors")
    plain = folder.with_name(f"{folder.name}-plain")
    stored = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix("weight")
            parts, weight = write(random, *tensor.shape)
            stored |= {f"{module}{part}": value for part, value in parts.items()}
            tensors[name] = torch.from_numpy(np.ascontiguousarray(weight))
        else:
            stored[name] = tensor
    for to, content in ((folder, stored), (plain, tensors)):
        to.mkdir(parents=True)
        for file in source.glob("*.json"):
            shutil.copy(file, to)
        save_file(content, to / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return plain
