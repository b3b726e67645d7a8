"""Block drafters (DSpark, DFlash) in DeepSpec's and in speculators' form."""

from __future__ import annotations

from typing import Any

from dspark_trt.checkpoints.drafters.deepspec import ARCHITECTURE, GEMMA4_ARCHITECTURE
from dspark_trt.checkpoints.drafters.written import (
    Written,
    decoder_keys,
    own_tensors,
    speculators_proposal,
    with_maps,
    with_shared,
)
from dspark_trt.checkpoints.spec import PLAIN_ATTENTION, BlockDrafterSpec, DrafterCheckpoint, TargetCheckpoint
from dspark_trt.errors import CheckpointError


def block_to_deepspec(spec: BlockDrafterSpec, drafter: DrafterCheckpoint, target: TargetCheckpoint) -> Written:
    """Raises CheckpointError with the key that DeepSpec's form has no place for."""
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
    _refuse_sinks(spec, "DeepSpec's")
    if not spec.is_plain_attention:
        raise CheckpointError(
            "layer_types, is_causal: the drafter has layers that are causal or slide, and DeepSpec's layers see the "
            "whole context and the whole block; use --to speculators"
        )
    config = {
        "architectures": [ARCHITECTURE if spec.decoder.gemma is None else GEMMA4_ARCHITECTURE],
        **decoder_keys(spec, drafter),
        "layer_types": ["full_attention"] * spec.decoder.num_layers,
        "num_target_layers": target.spec.decoder.num_layers,
        "target_layer_ids": list(spec.target_layer_ids),
        **_block_keys(spec),
        **_head_keys(spec),
    }
    return config, with_shared(own_tensors(drafter), target)


def block_to_speculators(
    spec: BlockDrafterSpec, drafter: DrafterCheckpoint, target: TargetCheckpoint, verifier: str
) -> Written:
    """Raises CheckpointError with the key that speculators' form has no place for."""
    if spec.decoder.gemma is not None or target.spec.family == "gemma4":
        raise CheckpointError(
            "transformer_layer_config: the drafter's layers are Gemma 4's, and the speculators form has Qwen3's; use "
            "--to deepspec"
        )
    _refuse_sinks(spec, "the speculators")
    has_heads = spec.markov_rank > 0 or spec.has_confidence_head
    kind = "dspark" if has_heads else "dflash"
    windows, is_non_causal = _window_keys(spec)
    config = {
        "architectures": ["DSparkDraftModel" if has_heads else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_config": speculators_proposal(spec.gamma, target.spec, kind, verifier),
        "transformer_layer_config": {**decoder_keys(spec, drafter), **windows},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.target_layer_ids],
        **_block_keys(spec),
        "draft_vocab_size": spec.num_draft_ids,
        "sample_from_anchor": not spec.is_mask_first,
        "sliding_window_non_causal": is_non_causal,
        **(_head_keys(spec) if has_heads else {}),
    }
    return config, with_maps(own_tensors(drafter), drafter)


def _refuse_sinks(spec: BlockDrafterSpec, form: str) -> None:
    if any(spec.attention_of(layer).has_sink for layer in range(spec.decoder.num_layers)):
        raise CheckpointError(
            f"attention_sink_bias: the drafter's layers have attention sinks, and {form} form has none; this drafter "
            "cannot be written in that form"
        )


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


def _block_keys(spec: BlockDrafterSpec) -> dict[str, Any]:
    return {"block_size": spec.block_length, "mask_token_id": spec.mask_token_id}


def _head_keys(spec: BlockDrafterSpec) -> dict[str, Any]:
    keys: dict[str, Any] = {"markov_rank": spec.markov_rank, "enable_confidence_head": spec.has_confidence_head}
    if spec.markov_rank:
        keys["markov_head_type"] = spec.markov_head_type
    if spec.has_confidence_head:
        keys["confidence_head_with_markov"] = spec.is_confidence_with_markov
    return keys
