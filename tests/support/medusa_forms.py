"""Tiny random Medusa heads in the forms that are published, and what they propose, in plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch
from dspark_trt.reference.heads import draw

Tensors = dict[str, NDArray[Any]]
Head = tuple[list[tuple[NDArray[Any], NDArray[Any]]], NDArray[Any]]  # blocks (weight, bias), and the matrix


def random_heads(target: Path, *, num_heads: int = 4, num_blocks: int = 1, seed: int = 1) -> list[Head]:
    config = json.loads((target / "config.json").read_text())
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> NDArray[Any]:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    return [
        (
            [(normal(hidden, hidden, scale=1.5 / hidden**0.5), normal(hidden, scale=0.5)) for _ in range(num_blocks)],
            normal(vocab_size, hidden, scale=3 / hidden**0.5),
        )
        for _ in range(num_heads)
    ]


def write_medusa(folder: Path, heads: list[Head], *, prefix: str = "", extra: dict[str, Any] | None = None) -> Path:
    """As Medusa's own trainer does: medusa_lm_head.safetensors. A value of None in `extra` removes a key."""
    tensors: Tensors = {}
    for number, (blocks, matrix) in enumerate(heads):
        for block, (weight, bias) in enumerate(blocks):
            tensors[f"{prefix}{number}.{block}.linear.weight"] = weight
            tensors[f"{prefix}{number}.{block}.linear.bias"] = bias
        tensors[f"{prefix}{number}.{len(blocks)}.weight"] = matrix
    config = {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": len(heads[0][0]),
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "transformers_version": "4.34.1",
    }
    return _write(folder, "medusa_lm_head.safetensors", tensors, config | (extra or {}))


def write_vllm_medusa(
    folder: Path,
    heads: list[Head],
    *,
    has_bias: bool = True,
    is_shared: bool = False,
    token_map: NDArray[np.int64] | None = None,
    is_map_applied: bool = True,
    extra: dict[str, Any] | None = None,
) -> Path:
    """As vLLM reads it. is_shared: all heads have the first one's matrix. token_map: ids of the rows; the matrices
    have these rows alone, or all (then the loader picks them)."""
    tensors: Tensors = {}
    for number, (blocks, matrix) in enumerate(heads):
        for block, (weight, bias) in enumerate(blocks):
            tensors[f"blocks.{number}.layers.{block}.weight"] = weight
            if has_bias:
                tensors[f"blocks.{number}.layers.{block}.bias"] = bias
        if not (is_shared and number):
            rows = slice(None) if token_map is None or not is_map_applied else token_map
            tensors[f"lm_heads.{number}.weight"] = matrix[rows]
    vocab_size, hidden = heads[0][1].shape
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": vocab_size,
        "num_heads": len(heads),
        "num_hidden_layers": len(heads[0][0]),
        "truncated_vocab_size": vocab_size,
        "medusa_fc_bias": has_bias,
        "original_lm_head": is_shared,
        "max_paths": 64,
        "topk": 10,
    }
    if token_map is not None:
        tensors["token_map"] = token_map
        config["truncated_vocab_size"] = len(token_map)
    return _write(folder, "model.safetensors", tensors, config | (extra or {}))


class MedusaOracle:
    """DraftEngine of the protocol: each head on the last state that was ingested. It proposes `ids` alone."""

    def __init__(self, heads: list[Head], limits: EngineLimits, ids: NDArray[np.int64] | None = None) -> None:
        self._heads = heads
        self._ids = ids
        self._states: dict[int, torch.Tensor] = {}
        self.limits = limits
        self.gamma = len(heads)

    @property
    def draft_vocab(self) -> NDArray[np.int64] | None:
        return self._ids

    def ingest(self, batch: IngestBatch) -> None:
        for row, end in zip(batch.rows.tolist(), np.cumsum(batch.query_lengths), strict=True):
            self._states[row] = torch.from_numpy(np.array(batch.taps[end - 1]))

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        if ingest is not None:
            self.ingest(ingest)
        num_slots = batch.uniforms.shape[1]
        states = torch.stack([self._states[row] for row in batch.rows.tolist()])
        logits = torch.stack([head_logits(head, states) for head in self._heads[:num_slots]], dim=1)  # [R, n, V]
        if self._ids is not None:
            logits = logits[..., torch.from_numpy(self._ids)]
        temperatures = torch.from_numpy(batch.temperatures)
        columns = torch.stack(
            [
                draw(logits[:, slot], temperatures, torch.from_numpy(batch.uniforms[:, slot]))
                for slot in range(num_slots)
            ],
            dim=1,
        ).numpy()
        first, second = logits.topk(2).values.unbind(-1)
        return DraftOutput(
            columns if self._ids is None else self._ids[columns], logits.numpy(), (first - second).numpy()
        )

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._states[destination] = self._states[source]


def head_logits(head: Head, states: torch.Tensor) -> torch.Tensor:
    """[R, D] -> [R, V]"""
    blocks, matrix = head
    x = states
    for weight, bias in blocks:
        x = x + torch.nn.functional.silu(x @ torch.from_numpy(weight).T + torch.from_numpy(bias))
    return x @ torch.from_numpy(matrix).T


def _write(folder: Path, file: str, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    save_file({name: np.ascontiguousarray(each) for name, each in tensors.items()}, folder / file)
    (folder / file).chmod(0o644)
    return folder
