"""A target and a drafter with random weights:
step times depend on shapes, not on values, so no checkpoint is downloaded."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.layout import drafter_shapes, target_shapes
from dspark_trt.checkpoints.spec import (
    BlockDrafterSpec,
    DecoderSpec,
    DrafterCheckpoint,
    TargetCheckpoint,
    TargetSpec,
    TensorInfo,
)

ElementType = Literal["float32", "bfloat16"]
_DTYPES: Mapping[ElementType, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


class RandomWeights:
    """A WeightStore of small random numbers; a tensor is the same whenever it is read, and norms scale by 1."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], element_type: ElementType = "float32") -> None:
        self._shapes = shapes
        self._element_type = element_type

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._shapes))

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._element_type, self._shapes[name])

    def array(self, name: str) -> NDArray[np.generic]:
        dtype = _DTYPES[self._element_type]
        if name.endswith("norm.weight"):
            return np.ones(self._shapes[name], dtype)
        random = np.random.default_rng(zlib.crc32(name.encode()))
        values = 0.02 * random.standard_normal(self._shapes[name], dtype=np.float32)
        return values.astype(dtype, copy=False)


def random_pair(
    decoder: DecoderSpec,
    *,
    taps: tuple[int, ...],
    num_drafter_layers: int,
    markov_rank: int,
    gamma: int = 7,
    element_type: ElementType = "float32",
) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    """A target of `decoder`, its head tied to its embedding,
    and a drafter of fewer such layers with a vanilla Markov head.

    Args:
        taps: the target's layers whose output the drafter reads, strictly increasing.
    """
    family: Literal["llama", "qwen3"] = "qwen3" if decoder.has_qk_norm else "llama"
    target = TargetSpec(family=family, decoder=decoder, is_head_tied=True, eos_token_ids=(2,))
    drafter = BlockDrafterSpec(
        decoder=replace(decoder, num_layers=num_drafter_layers),
        gamma=gamma,
        mask_token_id=decoder.vocab_size - 1,
        target_layer_ids=taps,
        markov_rank=markov_rank,
        markov_head_type="vanilla",
        has_confidence_head=True,
        has_confidence_bias=True,
        is_confidence_with_markov=True,
        has_own_embedding=False,
        has_own_head=False,
    )
    return (
        TargetCheckpoint(target, RandomWeights(target_shapes(target), element_type)),
        DrafterCheckpoint(drafter, RandomWeights(drafter_shapes(drafter), element_type)),
    )
