"""Checkpoints: the drafter as others read it, and what a training run needs to go on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from recipe.drafter import Drafter

_STATE_FILE = "training_state.pt"


@dataclass
class Progress:
    """How far a run is. `curve` holds (step, active seconds, acceptance by slot averaged over the latest steps)."""

    step: int = 0
    active_seconds: float = 0.0
    curve: list[tuple[int, float, list[float]]] = field(default_factory=list)


def save_drafter(drafter: Drafter, config: Path, folder: Path) -> None:
    """config.json and model.safetensors (bfloat16, without the target's embedding)."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config, folder / "config.json")
    tensors = {name: tensor.bfloat16().contiguous().cpu() for name, tensor in drafter.state_dict().items()}
    temporary = folder / "model.safetensors.partial"
    save_file(tensors, temporary, metadata={"format": "pt"})  # transformers asks for it
    os.replace(temporary, folder / "model.safetensors")


def save_state(
    folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, progress: Progress, draft_vocab: torch.Tensor
) -> None:
    """Float32 weights, optimizer, progress and draft vocabulary, for `load_state`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "drafter": drafter.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": vars(progress),
        "draft_vocab": draft_vocab,
    }
    temporary = folder / f"{_STATE_FILE}.partial"
    torch.save(values, temporary)
    os.replace(temporary, folder / _STATE_FILE)


def load_state(
    folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, device: str
) -> tuple[Progress, torch.Tensor] | None:
    """Restore a run and return its progress and draft vocabulary; None where none was saved."""
    path = folder / _STATE_FILE
    if not path.exists():
        return None
    values: Mapping[str, dict] = torch.load(path, map_location=device, weights_only=True)
    drafter.load_state_dict(values["drafter"])
    optimizer.load_state_dict(values["optimizer"])
    return Progress(**values["progress"]), values["draft_vocab"]
