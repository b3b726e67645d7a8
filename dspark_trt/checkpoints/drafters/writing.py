"""Writes a drafter down in DeepSpec's or speculators' form, where that form can hold it.

What a form has no key for is refused: a loader of that form would draft something else without an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dspark_trt.checkpoints.drafters.block import block_spec
from dspark_trt.checkpoints.drafters.deepspec import ARCHITECTURE, GEMMA4_ARCHITECTURE
from dspark_trt.checkpoints.drafters.draft_ids import D2T, T2D
from dspark_trt.checkpoints.families import FAMILIES
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import (
    PLAIN_ATTENTION,
    BlockDrafterSpec,
    DecoderSpec,
    DrafterCheckpoint,
    RopeSpec,
    TargetCheckpoint,
    TargetSpec,
)
from dspark_trt.errors import CheckpointError

Form = Literal["deepspec", "speculators"]

Written = tuple[dict[str, Any], dict[str, NDArray[Any]]]


def write_drafter(
    drafter: DrafterCheckpoint, target: TargetCheckpoint, folder: Path, form: Form, verifier: str
) -> None:
    """Write config.json and model.safetensors into `folder`, which is there.

    Args:
        verifier: how the target is called, for the speculators form.

    Raises CheckpointError where the form cannot hold the drafter, with the key that decides.
    """
    spec = block_spec(drafter, "convert")
    last_layer = target.spec.decoder.num_layers - 1
    make: Callable[[], Written] = {
        "deepspec": lambda: _deepspec(spec, drafter, target),
        "speculators": lambda: _speculators(spec, drafter, target, verifier),
    }[form]
    is_normed = form == "deepspec"
    if last_layer in spec.target_layer_ids and spec.is_last_tap_normed != is_normed:
        raise CheckpointError(
            f"target_layer_ids: the drafter taps the target's last layer ({last_layer}) "
            f"{'before' if is_normed else 'behind'} its final norm, and {form} means "
            f"{'behind' if is_normed else 'before'} it; this drafter cannot be written in that form"
        )
    config, tensors = make()
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    path = folder / "model.safetensors"
    save_file({name: np.ascontiguousarray(each) for name, each in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes for the owner alone


def _deepspec(spec: BlockDrafterSpec, drafter: DrafterCheckpoint, target: TargetCheckpoint) -> Written:
    if spec.is_mask_first:
        raise CheckpointError(
            "sample_from_anchor: the drafter is mask first, and DeepSpec's code drafts anchor first whatever a key "
            "says; use --to speculators"
        )
    if spec.draft_vocab_size is not None:
        raise CheckpointError(
            f"draft_vocab_size: the drafter has {spec.draft_vocab_size} of {spec.decoder.vocab_size} ids, and "
            "DeepSpec's form has no map of them; use --to speculators"
        )
    if not spec.is_plain_attention:
        raise CheckpointError(
            "layer_types, is_causal: the drafter has layers that are causal or slide, and DeepSpec's layers see the "
            "whole context and the whole block; use --to speculators"
        )
    config = {
        "architectures": [ARCHITECTURE if spec.decoder.gemma is None else GEMMA4_ARCHITECTURE],
        **_decoder_keys(spec, drafter),
        "layer_types": ["full_attention"] * spec.decoder.num_layers,
        "num_target_layers": target.spec.decoder.num_layers,
        "target_layer_ids": list(spec.target_layer_ids),
        **_block_keys(spec),
        **_head_keys(spec),
    }
    tensors = _tensors(drafter)
    of_target = {EMBEDDING: EMBEDDING, HEAD: EMBEDDING if target.spec.is_head_tied else HEAD}
    for name, name_of_target in of_target.items():
        tensors.setdefault(name, target.weights.array(name_of_target))  # DeepSpec's files have both
    return config, tensors


def _speculators(
    spec: BlockDrafterSpec, drafter: DrafterCheckpoint, target: TargetCheckpoint, verifier: str
) -> Written:
    if spec.decoder.gemma is not None or target.spec.family == "gemma4":
        raise CheckpointError(
            "transformer_layer_config: the drafter's layers are Gemma 4's, and the speculators form has Qwen3's; use "
            "--to deepspec"
        )
    has_heads = spec.markov_rank > 0 or spec.has_confidence_head
    kind = "dspark" if has_heads else "dflash"
    windows, is_non_causal = _window_keys(spec)
    config = {
        "architectures": ["DSparkDraftModel" if has_heads else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_config": _proposal(spec, target.spec, kind, verifier),
        "transformer_layer_config": {**_decoder_keys(spec, drafter), **windows},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.target_layer_ids],
        **_block_keys(spec),
        "draft_vocab_size": spec.num_draft_ids,
        "sample_from_anchor": not spec.is_mask_first,
        "sliding_window_non_causal": is_non_causal,
        **(_head_keys(spec) if has_heads else {}),
    }
    tensors = _tensors(drafter)
    if drafter.draft_ids is not None:
        ids = drafter.draft_ids
        tensors[D2T] = ids - np.arange(len(ids))
        tensors[T2D] = np.isin(np.arange(spec.decoder.vocab_size), ids)
    return config, tensors


def _proposal(spec: BlockDrafterSpec, target: TargetSpec, kind: str, verifier: str) -> dict[str, Any]:
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": spec.gamma}],
        "verifier": {"name_or_path": verifier, "architectures": [FAMILIES[target.family].architecture]},
    }


def _window_keys(spec: BlockDrafterSpec) -> tuple[dict[str, Any], bool]:
    """The keys of the layers, and sliding_window_non_causal."""
    layers = [spec.attention_of(layer) for layer in range(spec.decoder.num_layers)]
    sliding = {each for each in layers if each != PLAIN_ATTENTION}
    if any(each.window is None or each.window_from != "anchor" for each in sliding):
        raise CheckpointError(
            "layer_types, is_causal: the drafter has layers that are causal without a window, or whose window is "
            "counted from each slot; the speculators form has only windows counted from the anchor"
        )
    if len(sliding) > 1:
        raise CheckpointError(
            "sliding_window: the drafter's layers have different windows, and the speculators form has one"
        )
    if not sliding:
        return {"layer_types": ["full_attention"] * len(layers)}, False
    (form,) = sliding
    types = ["full_attention" if each == PLAIN_ATTENTION else "sliding_attention" for each in layers]
    return {"layer_types": types, "sliding_window": form.window, "use_sliding_window": True}, not form.is_causal


def _decoder_keys(spec: BlockDrafterSpec, drafter: DrafterCheckpoint) -> dict[str, Any]:
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


def _block_keys(spec: BlockDrafterSpec) -> dict[str, Any]:
    return {"block_size": spec.block_length, "mask_token_id": spec.mask_token_id}


def _head_keys(spec: BlockDrafterSpec) -> dict[str, Any]:
    keys: dict[str, Any] = {"markov_rank": spec.markov_rank, "enable_confidence_head": spec.has_confidence_head}
    if spec.markov_rank:
        keys["markov_head_type"] = spec.markov_head_type
    if spec.has_confidence_head:
        keys["confidence_head_with_markov"] = spec.is_confidence_with_markov
    return keys


def _tensors(drafter: DrafterCheckpoint) -> dict[str, NDArray[Any]]:
    return {name: drafter.weights.array(name) for name in drafter.weights.names()}
