"""Checkpoint tensors as float32 tensors of PyTorch."""

from __future__ import annotations

import numpy as np
import torch

from dspark_trt.checkpoints.spec import WeightStore


class ReferenceWeights:
    """Reads a tensor on first use, widens it to float32 and keeps it on `device`."""

    def __init__(self, store: WeightStore, device: str) -> None:
        self.device = device
        self._store = store
        self._names = frozenset(store.names())
        self._loaded: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._loaded:
            array = np.array(self._store.array(name), dtype=np.float32)  # a copy: stored arrays may be read-only maps
            self._loaded[name] = torch.from_numpy(array).to(self.device)
        return self._loaded[name]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Apply the Linear `name`, with its bias if the checkpoint has one."""
        bias_name = f"{name}.bias"
        bias = self[bias_name] if bias_name in self._names else None
        return torch.nn.functional.linear(x, self[f"{name}.weight"], bias)

    def rms_norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
        return x * scale * self[f"{name}.weight"]
