"""The families of targets in Hugging Face form: what a configuration means where it does not say it.

Every fact is that of the family's configuration and modelling code in transformers, which define the format; MiMo's are
in the code of its checkpoints, which builds on Qwen2's. Llama's `layer_types` are the one exception: transformers
ignores them there, and those who train and serve Llama-form models with windows read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dspark_trt.checkpoints.rope import DEFAULT_THETA
from dspark_trt.checkpoints.spec import Family
from dspark_trt.errors import CheckpointError, abridged

FULL, SLIDING = "full_attention", "sliding_attention"
_WINDOW = 4096  # of a file without the key `sliding_window`; null is no window
_MAX_WINDOW_LAYERS = 28

WindowRule = Literal["named", "above", "all", "uniform"]


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """One family.

    `window_rule`: which layers have the window where `layer_types` does not say it. "named": none. "above": those from
    `max_window_layers` on. "all": all. "uniform": all, and `layer_types` cannot say otherwise.
    """

    architecture: str
    max_positions: int  # where max_position_embeddings is absent
    window_rule: WindowRule
    default_window: int | None = _WINDOW
    has_window_switch: bool = False  # windows count with use_sliding_window only
    head_dim: int | None = None  # where it is absent; None: hidden_size / num_attention_heads
    has_qk_norm: bool = False
    has_qkv_bias: bool | None = None  # None: as attention_bias says, and o_proj too; otherwise o_proj has none
    has_mlp_bias: bool | None = None  # None: as mlp_bias says
    theta: float = DEFAULT_THETA  # where rope_theta is absent
    has_experts: bool = False
    has_fused_projections: bool = False  # q, k and v in one matrix, gate and up in another


_NO_BIAS: Mapping[str, Any] = {"has_qkv_bias": False, "has_mlp_bias": False}
FAMILIES: Mapping[Family, FamilyFacts] = {
    "llama": FamilyFacts("LlamaForCausalLM", 2048, "named", None),
    "qwen2": FamilyFacts(
        "Qwen2ForCausalLM", 32768, "above", has_window_switch=True, has_qkv_bias=True, has_mlp_bias=False
    ),
    "mimo": FamilyFacts(  # Qwen2's layers; the checkpoint's MTP modules are a drafter
        "MiMoForCausalLM", 32768, "above", has_window_switch=True, has_qkv_bias=True, has_mlp_bias=False
    ),
    "qwen3": FamilyFacts(
        "Qwen3ForCausalLM", 32768, "above", has_window_switch=True, head_dim=128, has_qk_norm=True, has_mlp_bias=False
    ),
    "mistral": FamilyFacts("MistralForCausalLM", 131072, "uniform", **_NO_BIAS),
    "ministral": FamilyFacts("MinistralForCausalLM", 131072, "all", **_NO_BIAS),
    "phi3": FamilyFacts("Phi3ForCausalLM", 4096, "uniform", None, has_fused_projections=True, **_NO_BIAS),
    "qwen2_moe": FamilyFacts(
        "Qwen2MoeForCausalLM",
        32768,
        "named",
        has_window_switch=True,
        has_qkv_bias=True,
        has_mlp_bias=False,
        has_experts=True,
    ),
    "qwen3_moe": FamilyFacts(
        "Qwen3MoeForCausalLM",
        32768,
        "uniform",
        has_window_switch=True,
        has_qk_norm=True,
        has_mlp_bias=False,
        has_experts=True,
    ),
    "mixtral": FamilyFacts("MixtralForCausalLM", 131072, "uniform", None, theta=1e6, has_experts=True, **_NO_BIAS),
}
WindowValues = Mapping[str, Any]  # of config.json, null kept: it is not the same as no key


def layer_windows(values: WindowValues, family: Family, num_layers: int, where: str) -> tuple[int | None, ...]:
    """How far each layer of a target sees (see DecoderSpec.layer_windows); empty where all see everything.

    Raises CheckpointError for layer types that are neither full nor sliding, and for windows that the keys leave open
    or contradict.
    """
    facts, stated = FAMILIES[family], _layer_types(values, num_layers, where)
    switch, window = values.get("use_sliding_window"), values.get("sliding_window", facts.default_window)
    is_on = bool(switch) if facts.has_window_switch else switch is not False
    types = stated if stated is not None and facts.window_rule != "uniform" else None
    if types is None:
        types = _types_by_rule(values, facts, num_layers, is_on and window is not None, where)
        if stated is not None and stated != types:
            raise CheckpointError(
                f"{where}: layer_types are not what sliding_window = {abridged(window)} says of every layer, which is "
                f"what counts in model_type {family!r}; correct the wrong one"
            )
    elif SLIDING in types and not is_on:
        raise CheckpointError(
            f"{where}: layer_types has {SLIDING}, but use_sliding_window is not true; correct the wrong one"
        )
    if SLIDING not in types:
        return ()
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(
            f"{where}: sliding_window has to be a number of positions for the layers with {SLIDING}, found "
            f"{abridged(window)}; take it from the training configuration"
        )
    return tuple(window if each == SLIDING else None for each in types)


def _types_by_rule(values: WindowValues, facts: FamilyFacts, num_layers: int, is_on: bool, where: str) -> list[str]:
    match facts.window_rule:
        case "named" if is_on and values.get("use_sliding_window"):
            raise CheckpointError(
                f"{where}: use_sliding_window does not say which layers of this model_type have the window; expected "
                "layer_types, take them from the training configuration"
            )
        case "above":
            stated = values.get("max_window_layers")
            first = _MAX_WINDOW_LAYERS if stated is None else stated
            return [SLIDING if is_on and index >= first else FULL for index in range(num_layers)]
        case "all" | "uniform":
            return [SLIDING if is_on else FULL] * num_layers
    return [FULL] * num_layers


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
