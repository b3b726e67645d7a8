"""Medusa heads in Medusa's own form and in vLLM's: neither DeepSpec nor speculators has one for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark_trt.checkpoints.drafters.medusa import ARCHITECTURE, TOKEN_MAP
from dspark_trt.checkpoints.drafters.written import Tensors, Written
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import DrafterCheckpoint, MedusaSpec, TargetCheckpoint
from dspark_trt.errors import CheckpointError


def medusa_to_own(spec: MedusaSpec, drafter: DrafterCheckpoint, target: TargetCheckpoint, verifier: str) -> Written:
    """A matrix for each head, and a bias for each block, whose absence is a bias of zeros.

    Raises CheckpointError with the key that the form has no place for.
    """
    if spec.draft_vocab_size is not None:
        raise CheckpointError(
            f"truncated_vocab_size: the heads have rows for {spec.draft_vocab_size} of {spec.decoder.vocab_size} ids, "
            "and Medusa's own form has no map of them; use --to vllm"
        )
    tensors: Tensors = {}
    for head in range(spec.gamma):
        for block in range(spec.num_blocks):
            weight = drafter.weights.array(f"heads.{head}.blocks.{block}.weight")
            tensors[f"{head}.{block}.linear.weight"] = weight
            tensors[f"{head}.{block}.linear.bias"] = (
                drafter.weights.array(f"heads.{head}.blocks.{block}.bias")
                if spec.has_block_bias
                else np.zeros(len(weight), weight.dtype)
            )
        tensors[f"{head}.{spec.num_blocks}.weight"] = _matrix(head, spec, drafter, target)
    config = {
        "medusa_num_heads": spec.gamma,
        "medusa_num_layers": spec.num_blocks,
        "base_model_name_or_path": verifier,
    }
    return config, tensors


def medusa_to_vllm(spec: MedusaSpec, drafter: DrafterCheckpoint, target: TargetCheckpoint) -> Written:
    """Every Medusa drafter has a place there."""
    tensors: Tensors = {}
    for head in range(spec.gamma):
        for block in range(spec.num_blocks):
            for part in ("weight", "bias") if spec.has_block_bias else ("weight",):
                name = f"heads.{head}.blocks.{block}.{part}"
                tensors[f"blocks.{head}.layers.{block}.{part}"] = drafter.weights.array(name)
        if not (spec.is_head_shared and head):
            tensors[f"lm_heads.{head}.weight"] = _matrix(head, spec, drafter, target)
    if drafter.draft_ids is not None:
        tensors[TOKEN_MAP] = drafter.draft_ids
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "medusa",
        "hidden_size": spec.decoder.hidden_size,
        "vocab_size": spec.decoder.vocab_size,
        "truncated_vocab_size": spec.num_draft_ids,
        "num_heads": spec.gamma,
        "num_hidden_layers": spec.num_blocks,
        "medusa_fc_bias": spec.has_block_bias,
        "original_lm_head": spec.is_head_shared,
    }
    return config, tensors


def _matrix(head: int, spec: MedusaSpec, drafter: DrafterCheckpoint, target: TargetCheckpoint) -> np.ndarray:
    """Rows of the vocabulary that the head proposes from, [W, D]."""
    if not spec.is_head_shared:
        return drafter.weights.array(f"heads.{head}.lm_head.weight")
    if spec.has_own_head:
        return drafter.weights.array(HEAD)
    return target.weights.array(EMBEDDING if target.spec.is_head_tied else HEAD)
