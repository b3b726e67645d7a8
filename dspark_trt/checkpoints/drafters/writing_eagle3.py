"""EAGLE-3 drafters in DeepSpec's and in speculators' form."""

from __future__ import annotations

from typing import Any

from dspark_trt.checkpoints.drafters.eagle3 import DEEPSPEC, DEEPSPEC_GEMMA4
from dspark_trt.checkpoints.drafters.eagle3_forms import LAYER_IDS
from dspark_trt.checkpoints.drafters.written import (
    Written,
    decoder_keys,
    own_tensors,
    speculators_proposal,
    with_maps,
    with_shared,
)
from dspark_trt.checkpoints.spec import DrafterCheckpoint, Eagle3Spec, TargetCheckpoint
from dspark_trt.errors import CheckpointError


def eagle3_to_deepspec(spec: Eagle3Spec, drafter: DrafterCheckpoint, target: TargetCheckpoint) -> Written:
    """Raises CheckpointError with the key that DeepSpec's form has no place for."""
    decoder = spec.decoder
    _refuse_other_layers(spec, "DeepSpec's")
    refused = {
        f"draft_vocab_size: the drafter has {spec.draft_vocab_size} of {decoder.vocab_size} ids, and DeepSpec's form "
        "has no map of them": spec.draft_vocab_size is not None,
        "q_norm, k_norm: the drafter's queries and keys are not normalised, and those of DeepSpec's layer are": (
            not decoder.has_qk_norm
        ),
        "norm_before_residual: the drafter's residual stream starts behind hidden_norm, and DeepSpec's before it": (
            spec.is_residual_normed
        ),
        "norm_output: the drafter's next step is fed normalised features, and DeepSpec's is not": spec.is_output_normed,
        "norm_before_fc, fc_norm: the drafter's taps are normalised before fc, and DeepSpec's are not": (
            spec.tap_norm != "none"
        ),
        "mlp_bias: the drafter's MLP has biases, and DeepSpec's has none": decoder.has_mlp_bias,
    }
    for reason, is_refused in refused.items():
        if is_refused:
            raise CheckpointError(f"{reason}; use --to speculators")
    config = {
        "architectures": [DEEPSPEC if decoder.gemma is None else DEEPSPEC_GEMMA4],
        **decoder_keys(spec, drafter),
        "layer_types": ["full_attention"],
        "num_target_layers": target.spec.decoder.num_layers,
        "target_layer_ids": list(spec.target_layer_ids),
        "draft_num_hidden_layers": 1,
        "ttt_length": spec.gamma,
    }
    return config, with_shared(own_tensors(drafter), target)


def eagle3_to_speculators(
    spec: Eagle3Spec, drafter: DrafterCheckpoint, target: TargetCheckpoint, verifier: str
) -> Written:
    """Raises CheckpointError with the key that speculators' form has no place for."""
    decoder = spec.decoder
    _refuse_other_layers(spec, "the speculators")
    if decoder.gemma is not None or target.spec.family == "gemma4":
        raise CheckpointError(
            "transformer_layer_config: the drafter's layer is Gemma 4's, and the speculators form has Llama's and "
            "Qwen3's; use --to deepspec"
        )
    of_layer: dict[str, Any] = {"model_type": "qwen3", "layer_types": ["full_attention"]}
    if not decoder.has_qk_norm:
        of_layer = {"model_type": "llama", "mlp_bias": decoder.has_mlp_bias}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": speculators_proposal(spec.gamma, target.spec, "eagle3", verifier),
        "transformer_layer_config": decoder_keys(spec, drafter) | of_layer,
        LAYER_IDS: [layer + 1 for layer in spec.target_layer_ids],
        "draft_vocab_size": spec.num_draft_ids,
        "norm_before_residual": spec.is_residual_normed,
        "norm_before_fc": spec.tap_norm == "joint",
        "fc_norm": spec.tap_norm == "each",
        "norm_output": spec.is_output_normed,
    }
    return config, with_maps(with_shared(own_tensors(drafter), target), drafter)


def _refuse_other_layers(spec: Eagle3Spec, form: str) -> None:
    keys = {"draft_length: the drafter is DART's, with a vector for masks": spec.is_masked}
    keys["num_nextn_predict_layers: the drafter is an MTP module of its target's checkpoint"] = spec.is_module
    for what, is_found in keys.items():
        if is_found:
            raise CheckpointError(f"{what}, and {form} EAGLE-3 form has no place for it")
