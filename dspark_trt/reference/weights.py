"""Checkpoint tensors as tensors of PyTorch."""

from __future__ import annotations

import numpy as np
import torch

from dspark_trt.checkpoints.spec import WeightStore


class ReferenceWeights:
    """Reads a tensor on first use, brings it into the element type asked for and keeps it on `device`."""

    def __init__(self, store: WeightStore, device: str, element_type: torch.dtype = torch.float32) -> None:
        self.device = device
        self.element_type = element_type
        self.store = store
        self._names = frozenset(store.names())
        self._loaded: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.typed(name, self.element_type)

    def typed(self, name: str, element_type: torch.dtype) -> torch.Tensor:
        key = (name, element_type)
        if key not in self._loaded:
            array = np.array(self.store.array(name), dtype=np.float32)  # a copy: stored arrays may be read-only maps
            self._loaded[key] = torch.from_numpy(array).to(element_type).to(self.device)
        return self._loaded[key]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Apply the Linear `name`, with its bias if the checkpoint has one, in the element type of `x`."""
        bias_name = f"{name}.bias"
        bias = self.typed(bias_name, x.dtype) if bias_name in self._names else None
        return torch.nn.functional.linear(x, self.typed(f"{name}.weight", x.dtype), bias)

    def rms_norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        """In float32, whatever the element type of `x`, which the result has again."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * self.typed(f"{name}.weight", torch.float32)).to(x.dtype)
