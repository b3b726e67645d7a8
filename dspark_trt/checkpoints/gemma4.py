"""Gemma 4's text decoder in config.json: which layers slide, what their heads are, and what is refused.

A configuration is that of the text model alone (`gemma4_text`, `gemma4_unified_text`) or of a multimodal one that has
it under `text_config` (`gemma4`, `gemma4_unified`: the 12B form). Of such a checkpoint the text model is read; the
parts for images and sound are left out.

Layers come in two types. Sliding ones have `head_dim` and `num_key_value_heads`. Full ones have what stands under
`per_layer_config`, or in older files under `global_head_dim` and (with `attention_k_eq_v`)
`num_global_key_value_heads`. Source: transformers, models gemma4 and gemma4_unified.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from dspark_trt.checkpoints.checks import check_sizes
from dspark_trt.checkpoints.config import DecoderConfig, parse, refuse_unsupported
from dspark_trt.checkpoints.rope import RopeParameters, rope_spec
from dspark_trt.checkpoints.spec import DecoderSpec, GemmaSpec, LayerShape, RopeSpec
from dspark_trt.errors import CheckpointError

logger = logging.getLogger(__name__)

ARCHITECTURES = {
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
}
_MULTIMODAL = ("gemma4", "gemma4_unified")
_OTHER_PARTS = ("vision_tower.", "audio_tower.", "vision_embedder.", "embed_vision.", "embed_audio.")

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN = 6  # where layer_types is not written, every sixth layer is full
_MAX_LAYERS = 1024
_DEFAULT_ROPE = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


class LayerOverrides(BaseModel):
    """What one layer has of its own. An unknown key could change what it computes, so it is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    head_dim: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None


class GemmaKeys(BaseModel):
    """The keys that Llama's decoder does not have, or has with another meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    head_dim: PositiveInt = 256
    num_key_value_heads: PositiveInt = 4
    global_head_dim: PositiveInt = 512
    num_global_key_value_heads: PositiveInt | None = None
    per_layer_config: dict[str, LayerOverrides] | None = None
    attention_k_eq_v: bool = False
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    sliding_window: PositiveInt | None = None
    rope_parameters: dict[Literal["full_attention", "sliding_attention"], RopeParameters] = Field(
        default_factory=lambda: {key: RopeParameters(**value) for key, value in _DEFAULT_ROPE.items()}  # type: ignore[arg-type]
    )
    final_logit_softcapping: PositiveFloat | None = None
    hidden_activation: str = "gelu_pytorch_tanh"
    use_bidirectional_attention: str | None = None
    hidden_size_per_layer_input: int | None = None
    vocab_size_per_layer_input: int | None = None
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False  # of layers that share KV only
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None


def text_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of the text model. Raises CheckpointError where a multimodal configuration has none."""
    if values.get("model_type") not in _MULTIMODAL:
        return dict(values)
    text = values.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") not in (None, f"{values['model_type']}_text"):
        raise CheckpointError(
            f"{where}: text_config: expected the text model of a {values['model_type']} checkpoint, found "
            f"{'none' if not isinstance(text, dict) else text.get('model_type')!r}; download the file again"
        )
    if parts := [name for name in ("vision_config", "audio_config") if values.get(name)]:
        logger.info("%s: %s: only text is served; the parts for images and sound are left out", where, ", ".join(parts))
    whole = {key: values[key] for key in ("tie_word_embeddings", "bos_token_id") if values.get(key) is not None}
    if ends := [*_listed(values.get("eos_token_id")), *_listed(text.get("eos_token_id"))]:
        whole["eos_token_id"] = ends
    return {**text, "model_type": f"{values['model_type']}_text", **whole}


def stored_name(name: str) -> str:
    """Canonical name of a stored tensor of the text model."""
    return name.removeprefix("model.").removeprefix("language_model.")


def is_of_other_part(name: str) -> bool:
    """Whether a tensor, by its canonical name, belongs to the parts for images and sound."""
    return name.startswith(_OTHER_PARTS)


def read_decoder(values: Mapping[str, Any], where: str, *, is_causal: bool = True) -> tuple[DecoderConfig, DecoderSpec]:
    """The configuration of the text model in `values`: its plain keys, and the decoder. `is_causal` as in
    `refuse_unsupported`.

    Raises CheckpointError for keys that are missing or wrong, and by name for what is not implemented.
    """
    own = {key: value for key, value in values.items() if key in GemmaKeys.model_fields}
    plain = {key: value for key, value in values.items() if key not in own}
    keys = parse(GemmaKeys, own, where)
    is_unified = str(values.get("model_type")).startswith("gemma4_unified")
    _refuse_other_forms(keys, is_unified, where)
    refuse_unsupported(plain, where, is_causal=is_causal)
    defaults = {
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "max_position_embeddings": 262_144 if is_unified else 131_072,
    }
    config = parse(DecoderConfig, {**defaults, **{k: v for k, v in plain.items() if v is not None}}, where)
    types = _layer_types(keys, config.num_hidden_layers, where)
    layers = tuple(_shape(keys, config, types, layer, where) for layer in range(len(types)))
    window = keys.sliding_window or (1024 if is_unified else 512)
    decoder = DecoderSpec(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=float(config.rms_norm_eps),
        rope=layers[0].rope,
        max_position_embeddings=config.max_position_embeddings or 1,
        has_qk_norm=True,
        has_qkv_bias=config.attention_bias,
        has_o_bias=config.attention_bias,
        has_mlp_bias=False,
        layer_windows=tuple(window if each == _SLIDING else None for each in types) if _SLIDING in types else (),
        gemma=GemmaSpec(layers, logit_softcap=_float(keys.final_logit_softcapping)),
    )
    check_sizes(decoder, where)
    return config, decoder


def _refuse_other_forms(keys: GemmaKeys, is_unified: bool, where: str) -> None:
    """Raises CheckpointError for Gemma 4 models that compute something else. Absent means 256 in `gemma4_text`."""
    per_layer_input = keys.hidden_size_per_layer_input
    if per_layer_input is None:
        per_layer_input = 0 if is_unified else 256
    found = {
        f"hidden_size_per_layer_input = {per_layer_input} (per-layer input embeddings, as E2B and E4B have them)": (
            per_layer_input != 0
        ),
        f"num_kv_shared_layers = {keys.num_kv_shared_layers} (layers that read the keys and values of others, as in "
        "E2B and E4B)": keys.num_kv_shared_layers != 0,
        "enable_moe_block = true (mixture of experts, as in 26B-A4B)": keys.enable_moe_block,
        "use_bidirectional_attention = 'all'": keys.use_bidirectional_attention not in (None, "vision"),
        f"hidden_activation = {keys.hidden_activation!r}": keys.hidden_activation != "gelu_pytorch_tanh",
    }
    for what, is_found in found.items():
        if is_found:
            raise CheckpointError(
                f"{where}: {what} is not implemented; of Gemma 4 the dense text models are supported, for example "
                "google/gemma-4-12B-it"
            )


def _layer_types(keys: GemmaKeys, num_layers: int, where: str) -> list[str]:
    if num_layers > _MAX_LAYERS:
        raise CheckpointError(f"{where}: num_hidden_layers: expected 1 to {_MAX_LAYERS}, found {num_layers}")
    types: list[str] = [*(keys.layer_types or ())]
    if keys.layer_types is None:
        types = [_SLIDING if (layer + 1) % _PATTERN else _FULL for layer in range(num_layers)]
    if len(types) != num_layers:
        raise CheckpointError(
            f"{where}: layer_types: expected one entry for each of the {num_layers} layers (num_hidden_layers), found "
            f"{len(types)}; correct one of them"
        )
    if types[-1] != _FULL:
        logger.warning(
            "%s: layer_types: the last layer is %s, which transformers takes as full attention", where, types[-1]
        )
        types[-1] = _FULL
    return types


def _shape(keys: GemmaKeys, config: DecoderConfig, types: list[str], layer: int, where: str) -> LayerShape:
    own, is_full = _overrides(keys, types, where).get(layer), types[layer] == _FULL
    head_dim = (own.head_dim if own else None) or keys.head_dim
    num_kv_heads = (own.num_key_value_heads if own else None) or keys.num_key_value_heads
    if config.num_attention_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{where}: layer {layer} has {config.num_attention_heads} heads, {num_kv_heads} KV heads and head_dim "
            f"{head_dim}; expected a multiple of the KV heads and an even head_dim"
        )
    return LayerShape(num_kv_heads, head_dim, _rope(keys, types[layer], where), keys.attention_k_eq_v and is_full)


def _overrides(keys: GemmaKeys, types: list[str], where: str) -> dict[int, LayerOverrides]:
    if keys.per_layer_config is None:
        num_kv_heads = keys.num_global_key_value_heads if keys.attention_k_eq_v else None
        full = LayerOverrides(head_dim=keys.global_head_dim, num_key_value_heads=num_kv_heads)
        return {layer: full for layer, each in enumerate(types) if each == _FULL}
    overrides = {}
    for name, each in keys.per_layer_config.items():
        layer = int(name) if name.isdecimal() and len(name) < 5 else len(types)
        if layer >= len(types):
            raise CheckpointError(
                f"{where}: per_layer_config has an entry for layer {name[:20]!r}, and there are {len(types)} layers; "
                "correct one of them"
            )
        overrides[layer] = each
    return overrides


def _rope(keys: GemmaKeys, layer_type: str, where: str) -> RopeSpec:
    parameters = {str(key): value for key, value in keys.rope_parameters.items()}.get(layer_type)
    if parameters is None:
        raise CheckpointError(f"{where}: rope_parameters has nothing for {layer_type} layers; download the file again")
    place = f"{where}: rope_parameters.{layer_type}"
    spec = rope_spec(parameters, theta=None, original=None, max_position_embeddings=1, where=place)
    if spec.rope_type not in ("default", "proportional"):
        raise CheckpointError(f"{place}: rope type {spec.rope_type!r} is not one of Gemma 4 (default or proportional)")
    return spec


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)
