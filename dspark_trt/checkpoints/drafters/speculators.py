"""The dialect of vLLM's *speculators*: `speculators_model_type` dspark or dflash, the decoder's keys nested.

A layer id counts what went into that layer, so it is one above DeepSpec's, and 0 is the embedding. Taps come from
vLLM, which takes the last layer's output as it is, before the final norm. `sample_from_anchor` decides whether the
anchor's position predicts; exports that lack it are older than it and mean false. Sliding layers are causal unless
`sliding_window_non_causal`; their window is counted from the anchor back over the context. The head and W2 may have
rows for some ids only: `t2d` marks them, `d2t` has what to add to a draft id.

Source: speculators' dflash and dspark models (config, masks, training forward) and its converter for vLLM.
"""

from __future__ import annotations

from typing import Any

from dspark_trt.checkpoints.drafters.description import Description, describe, stated_mask_first, without
from dspark_trt.checkpoints.drafters.windows import read_windows
from dspark_trt.errors import CheckpointError

DIALECT = "speculators"
_LAYER_IDS = "aux_hidden_state_layer_ids"
_NESTED = "transformer_layer_config"
_COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")


def read(values: dict[str, Any], where: str) -> Description:
    """Raises CheckpointError as `describe` does."""
    layer = values.get(_NESTED)
    if not isinstance(layer, dict):
        raise CheckpointError(
            f"{where}: {_NESTED} is missing: it holds the sizes of the drafter's layers; download the file again"
        )
    is_non_causal = values.get("sliding_window_non_causal")
    if not isinstance(is_non_causal, bool | None):
        raise CheckpointError(f"{where}: sliding_window_non_causal: expected true or false, found {is_non_causal!r}")
    is_mask_first = stated_mask_first(values, where)
    is_mask_first = True if is_mask_first is None else is_mask_first
    _check_proposal(values, where, is_mask_first=is_mask_first)
    if values.get("projector_type") not in (None, "dflash"):
        raise CheckpointError(f"{where}: projector_type {values['projector_type']!r} is not supported")
    if values.get("draft_vocab_size") is None:
        raise CheckpointError(
            f"{where}: draft_vocab_size is missing: it says how many ids the head has rows for; take it from the "
            "training configuration"
        )
    if (width := values.get("target_hidden_size")) not in (None, layer.get("hidden_size")):
        raise CheckpointError(
            f"{where}: target_hidden_size = {width} is not hidden_size = {layer.get('hidden_size')}; expected a "
            "drafter as wide as its target"
        )
    if values.get(_LAYER_IDS) is None:
        raise CheckpointError(
            f"{where}: {_LAYER_IDS} is missing; it says which target layers the drafter was trained on, and no default "
            "is right for another drafter: take the value from the training configuration"
        )
    own = {key: values[key] for key in _KEYS if values.get(key) is not None}
    causal = {key: values[key] for key in ("is_causal", "causal") if values.get(key) is not None}
    attention, plain = read_windows(
        {**layer, **causal},
        where,
        is_sliding_causal=not is_non_causal,
        window_from="anchor",
    )
    return describe(
        {**without(plain, "target_layer_ids"), **own, "target_layer_ids": values[_LAYER_IDS]},
        where,
        dialect=DIALECT,
        is_mask_first=is_mask_first,
        is_last_tap_normed=False,
        block_attention=attention,
        layer_ids_key=_LAYER_IDS,
        layer_id_offset=1,
        copies_of_target=_COPIES,
    )


_KEYS = (
    "block_size",
    "mask_token_id",
    "draft_vocab_size",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "runtime_block_size",
    # refused by name where they say something
    "use_swa",
    "swa_window_size",
    "attention_sink_bias",
    "is_neox_style",
)


def _check_proposal(values: dict[str, Any], where: str, *, is_mask_first: bool) -> None:
    """speculative_tokens follows from block_size and sample_from_anchor; one that does not tells of a wrong export."""
    try:
        stated = values["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        return  # says nothing
    block_size = values.get("block_size")
    if isinstance(stated, int) and isinstance(block_size, int) and stated != (expected := block_size - is_mask_first):
        anchor = values.get("sample_from_anchor")
        raise CheckpointError(
            f"{where}: speculative_tokens = {stated}, but block_size = {block_size} with sample_from_anchor = "
            f"{'absent (which means false)' if anchor is None else str(anchor).lower()} gives {expected}; "
            "sample_from_anchor decides: set it as the drafter was trained"
        )
