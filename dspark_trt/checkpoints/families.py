"""The families of targets in Hugging Face form: what a configuration means where it does not say it.

Every fact is that of the family's configuration and modelling code in transformers, which define the format. Llama's
`layer_types` are the one exception: transformers ignores them there, and those who train and serve Llama-form models
with windows read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark_trt.checkpoints.spec import Family
from dspark_trt.errors import CheckpointError, abridged

FULL, SLIDING = "full_attention", "sliding_attention"
_WINDOW = 4096  # of a file without the key `sliding_window`; null is no window


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """One family."""

    architecture: str
    max_positions: int  # where max_position_embeddings is absent
    head_dim: int | None = None  # where it is absent; None: hidden_size / num_attention_heads
    has_qk_norm: bool = False
    has_qkv_bias: bool | None = None  # None: as attention_bias says, and o_proj too; otherwise o_proj has none
    has_mlp_bias: bool | None = None  # None: as mlp_bias says


FAMILIES: Mapping[Family, FamilyFacts] = {
    "llama": FamilyFacts("LlamaForCausalLM", 2048),
    "qwen2": FamilyFacts("Qwen2ForCausalLM", 32768, has_qkv_bias=True, has_mlp_bias=False),
    "qwen3": FamilyFacts("Qwen3ForCausalLM", 32768, head_dim=128, has_qk_norm=True, has_mlp_bias=False),
    "mistral": FamilyFacts("MistralForCausalLM", 131072, has_qkv_bias=False, has_mlp_bias=False),
    "ministral": FamilyFacts("MinistralForCausalLM", 131072, has_qkv_bias=False, has_mlp_bias=False),
}
WindowValues = Mapping[str, Any]  # of config.json, null kept: it is not the same as no key


def layer_windows(values: WindowValues, family: Family, num_layers: int, where: str) -> tuple[int | None, ...]:
    """How far each layer of a target sees (see DecoderSpec.layer_windows); empty where all see everything.

    Raises CheckpointError for layer types that are neither full nor sliding, and for windows that the keys leave open
    or contradict.
    """
    stated = _layer_types(values, num_layers, where)
    window: int | None
    if family in ("mistral", "ministral"):
        window = _number(values.get("sliding_window", _WINDOW), where)
        types = stated or [SLIDING if window else FULL] * num_layers
        if family == "mistral" and stated and set(stated) != {SLIDING if window else FULL}:
            raise CheckpointError(
                f"{where}: layer_types do not say of every layer what sliding_window = {window} says, which is what "
                "counts in model_type 'mistral'; write model_type 'ministral' if the layers differ"
            )
    else:
        stated_use = values.get("use_sliding_window")
        is_used = bool(stated_use)
        default = None if family == "llama" else _WINDOW
        window = _number(values.get("sliding_window", default), where) if is_used or stated else None
        if is_used and window and not stated and family == "llama":
            raise CheckpointError(
                f"{where}: use_sliding_window does not say which layers of a model_type 'llama' have the window of "
                f"{window}; expected layer_types, take them from the training configuration"
            )
        if stated and SLIDING in stated and not is_used and (family != "llama" or stated_use is False):
            raise CheckpointError(
                f"{where}: layer_types has {SLIDING}, but use_sliding_window is not true; correct the wrong one"
            )
        first = values.get("max_window_layers")
        first = 28 if first is None else first
        types = stated or [SLIDING if is_used and window and index >= first else FULL for index in range(num_layers)]
    if SLIDING not in types:
        return ()
    if window is None:
        raise CheckpointError(
            f"{where}: layer_types has {SLIDING}, so sliding_window has to be a number of positions, found "
            f"{abridged(values.get('sliding_window'))}; take it from the training configuration"
        )
    return tuple(window if each == SLIDING else None for each in types)


def _layer_types(values: WindowValues, num_layers: int, where: str) -> list[str] | None:
    types = values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        found = f"{len(types)} entries" if isinstance(types, list) else abridged(types)
        raise CheckpointError(
            f"{where}: layer_types: expected one entry for each of the {num_layers} layers (num_hidden_layers), found "
            f"{found}; correct one of them"
        )
    if unknown := sorted({abridged(each).strip("'") for each in types if each not in (FULL, SLIDING)}):
        raise CheckpointError(
            f"{where}: layer_types has {unknown}, which is not implemented; expected {FULL} or {SLIDING}"
        )
    return types


def _number(window: Any, where: str) -> int | None:
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(
            f"{where}: sliding_window: expected a number of positions or null, found {abridged(window)}; take it from "
            "the training configuration"
        )
    return window
