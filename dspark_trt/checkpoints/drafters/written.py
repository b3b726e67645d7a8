"""What a drafter's form says of its decoder layers, and its tensors: shared by the families that `convert` writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.drafters.draft_ids import D2T, T2D
from dspark_trt.checkpoints.families import FAMILIES
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import (
    DecoderSpec,
    DrafterCheckpoint,
    DrafterSpec,
    RopeSpec,
    TargetCheckpoint,
    TargetSpec,
)

Tensors = dict[str, NDArray[Any]]
Written = tuple[dict[str, Any], Tensors]  # config.json, and the tensors by their names


def decoder_keys(spec: DrafterSpec, drafter: DrafterCheckpoint) -> dict[str, Any]:
    decoder = spec.decoder
    return {
        "model_type": "qwen3",
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": decoder.rms_norm_eps,
        "max_position_embeddings": decoder.max_position_embeddings,
        "rope_parameters": _rope_keys(decoder.rope),
        "attention_bias": decoder.has_qkv_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": drafter.weights.info("fc.weight").dtype,
        **(_gemma_keys(decoder) if decoder.gemma else {}),
    }


def _gemma_keys(decoder: DecoderSpec) -> dict[str, Any]:
    """What Gemma 4's configuration says otherwise; None: not at all."""
    assert decoder.gemma is not None
    return {
        "model_type": "gemma4_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": decoder.head_dim,
        "num_global_key_value_heads": decoder.num_kv_heads,
        "attention_k_eq_v": decoder.shape_of(0).is_value_of_key,
        "final_logit_softcapping": decoder.gemma.logit_softcap,
        "rope_parameters": {"full_attention": _rope_keys(decoder.rope)},
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    }


def _rope_keys(rope: RopeSpec) -> dict[str, Any]:
    keys = {name: value for name, value in asdict(rope).items() if value is not None}
    keys["rope_theta"] = keys.pop("theta")
    if rope.rope_type != "yarn":
        keys.pop("truncate")
    return keys


def own_tensors(drafter: DrafterCheckpoint) -> Tensors:
    """Those of the file, under canonical names."""
    return {name: drafter.weights.array(name) for name in drafter.weights.names()}


def with_shared(tensors: Tensors, target: TargetCheckpoint) -> Tensors:
    """The target's embedding and head too, where the drafter has none of its own."""
    of_target = {EMBEDDING: EMBEDDING, HEAD: EMBEDDING if target.spec.is_head_tied else HEAD}
    return {name: target.weights.array(of) for name, of in of_target.items() if name not in tensors} | tensors


def with_maps(tensors: Tensors, drafter: DrafterCheckpoint) -> Tensors:
    """The maps of a reduced vocabulary too, where there is one."""
    ids = drafter.draft_ids
    if ids is None:
        return tensors
    return tensors | {D2T: ids - np.arange(len(ids)), T2D: np.isin(np.arange(drafter.spec.decoder.vocab_size), ids)}


def speculators_proposal(gamma: int, target: TargetSpec, kind: str, verifier: str) -> dict[str, Any]:
    """speculators_config: how many drafts, and for which target."""
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": gamma}],
        "verifier": {"name_or_path": verifier, "architectures": [FAMILIES[target.family].architecture]},
    }
