"""Specification and tensors of a checkpoint together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec.decoder import TargetSpec
from dspark_trt.checkpoints.spec.drafters import DrafterSpec


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `file` and `offset` are set when its bytes stand contiguously in a file on disk."""

    dtype: str  # numpy or ml_dtypes name: float32, float16, bfloat16
    shape: tuple[int, ...]
    file: Path | None = None  # as named; may be a symlink of a hub cache
    offset: int | None = None  # bytes from the start of the file


class WeightStore(Protocol):
    """Tensors of one checkpoint under canonical names, read lazily."""

    def names(self) -> tuple[str, ...]:
        """All canonical names, sorted."""
        ...

    def info(self, name: str) -> TensorInfo: ...

    def array(self, name: str) -> NDArray[np.generic]:
        """The tensor in its stored element type (GGUF: de-quantised to float32), memory-mapped where possible."""
        ...


@dataclass(frozen=True, slots=True)
class TargetCheckpoint:
    spec: TargetSpec
    weights: WeightStore


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    spec: DrafterSpec
    weights: WeightStore
    draft_ids: NDArray[np.int64] | None = None  # [W] target ids of the rows of head and W2, ascending; None: all
