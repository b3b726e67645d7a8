"""Reads a GGUF file of the Llama, Qwen2, Qwen3 or Qwen3-MoE family as a target.

The hyperparameters are a closed list: a key under the architecture's name that is not known here would change the
mathematics, so it is refused by name. Source: the GGUF key registry of the `gguf` package.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf

from dspark_trt.checkpoints.checks import check_sizes, check_tensors, check_token_ids
from dspark_trt.checkpoints.config import known_token
from dspark_trt.checkpoints.experts import MAX_EXPERTS, with_expert_stacks
from dspark_trt.checkpoints.families import FAMILIES
from dspark_trt.checkpoints.gguf_header import check_header
from dspark_trt.checkpoints.gguf_rope import Getter, gguf_rope, with_rope_factors
from dspark_trt.checkpoints.gguf_store import ROPE_FREQUENCIES, GgufStore, canonical_name
from dspark_trt.checkpoints.gguf_tokenizer import gguf_end_tokens, gguf_text
from dspark_trt.checkpoints.layout import HEAD, target_shapes
from dspark_trt.checkpoints.opening import check_file
from dspark_trt.checkpoints.rope import reach
from dspark_trt.checkpoints.spec import (
    DecoderSpec,
    ExpertsSpec,
    Family,
    TargetCheckpoint,
    TargetSpec,
    WeightStore,
)
from dspark_trt.checkpoints.target_text import TargetText, check_vocabulary, end_token_ids
from dspark_trt.errors import CheckpointError

_FAMILIES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_EXPERT_KEYS = {"expert_count", "expert_used_count", "expert_feed_forward_length"}  # of those that have experts
_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
}
_NEUTRAL_VALUES = {
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "expert_gating_func": 1,  # softmax
    "expert_weights_norm": True,  # as llama.cpp does with this family in any case
    "expert_weights_scale": 1.0,
    "expert_shared_count": 0,
}


def open_gguf(path: Path) -> Any:
    """A gguf.GGUFReader. Raises CheckpointError for a truncated file, another format or one part of a split model."""
    check_file(path)
    check_header(path)
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise CheckpointError(f"{path}: not a complete GGUF file ({error}); download it again") from None
    if num_parts := field(reader, "split.count"):
        raise CheckpointError(
            f"{path}: one of {num_parts} parts of a split model; join them with `llama-gguf-split --merge` first"
        )
    return reader


def field(reader: Any, key: str) -> Any:
    """The value of a metadata key, or None. Raises CheckpointError for a text that is not UTF-8."""
    entry = reader.get_field(key)
    try:
        return None if entry is None else entry.contents()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"metadata {key} is not valid text ({error}); download the file again") from None


def read_gguf_target(path: Path) -> TargetCheckpoint:
    """Raises CheckpointError when the file is damaged, of another family, or has metadata that is not implemented."""
    reader = open_gguf(path)
    architecture = field(reader, gguf.Keys.General.ARCHITECTURE)
    if architecture not in _FAMILIES:
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not supported in GGUF files; expected one of "
            f"{', '.join(_FAMILIES)}, or use the model's Hugging Face checkpoint"
        )
    family = _FAMILIES[architecture]
    get = _hyperparameters(reader, architecture, path)
    tensors = {canonical_name(tensor.name): tensor for tensor in reader.tensors}
    rope_factors = tensors.pop(ROPE_FREQUENCIES, None)
    try:
        decoder = _decoder(get, family, tensors, path)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: metadata of a wrong type ({error}); convert the model again") from None
    if rope_factors is not None:
        decoder = with_rope_factors(decoder, gguf.dequantize(rope_factors.data, rope_factors.tensor_type), get, path)
    text = _text(reader, path)
    spec = TargetSpec(
        family=family,
        decoder=decoder,
        is_head_tied=HEAD not in tensors,
        eos_token_ids=end_token_ids({"the file": gguf_end_tokens(reader)}, text, str(path)),
        bos_token_id=known_token(field(reader, gguf.Keys.Tokenizer.BOS_ID), decoder.vocab_size, str(path)),
    )
    if text is not None:
        check_vocabulary(text, decoder.vocab_size, str(path))
    weights: WeightStore = GgufStore(path, tensors, _permuted_heads(spec, tensors))
    if decoder.experts is not None:
        weights = with_expert_stacks(weights, decoder.experts, decoder.hidden_size, str(path))
    check_tensors(weights, target_shapes(spec), str(path))
    check_token_ids(spec, str(path))
    return TargetCheckpoint(spec, weights)


def _text(reader: Any, path: Path) -> TargetText | None:
    """None where there is no tokenizer that is known: whoever needs it says what is wrong with it."""
    try:
        return gguf_text(reader, path)
    except CheckpointError:
        return None


def _hyperparameters(reader: Any, family: str, path: Path) -> Getter:
    values = {
        key.removeprefix(f"{family}."): reader.get_field(key).contents()
        for key in reader.fields
        if key.startswith(f"{family}.")
    }
    for key, value in values.items():
        if key in _EXPERT_KEYS and FAMILIES[_FAMILIES[family]].has_experts:
            continue
        neutral = _NEUTRAL_VALUES.get(key)
        if (neutral is not None and value != neutral) or (neutral is None and key not in _KNOWN_KEYS):
            raise CheckpointError(
                f"{path}: metadata {family}.{key} = {value!r} is not implemented; ignoring it would change the "
                "output, so use the model's Hugging Face checkpoint or another model"
            )
        if isinstance(value, list):
            raise CheckpointError(
                f"{path}: metadata {family}.{key} differs by layer ({value}), which is not implemented"
            )
    return values.get


def _decoder(get: Getter, family: Family, tensors: dict[str, Any], path: Path) -> DecoderSpec:
    def require(key: str) -> Any:
        if (value := get(key)) is None:
            raise CheckpointError(f"{path}: metadata key {key} is missing; convert the model again")
        return value

    hidden_size, num_heads = require("embedding_length"), require("attention.head_count")
    if not all(isinstance(size, int) and size > 0 for size in (hidden_size, num_heads)):
        raise CheckpointError(
            f"{path}: embedding_length and attention.head_count: expected positive numbers, found {hidden_size} and "
            f"{num_heads}; convert the model again"
        )
    head_dim = get("attention.key_length") or hidden_size // num_heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key) not in (None, head_dim):
            raise CheckpointError(
                f"{path}: {key} = {get(key)} differs from the head dimension {head_dim}, which is not implemented"
            )
    embedding = tensors.get("embed_tokens.weight")
    vocab_size = get("vocab_size") or (0 if embedding is None else int(embedding.shape[1]))
    context = require("context_length")
    rope = gguf_rope(get, context, path)
    decoder = DecoderSpec(
        num_layers=require("block_count"),
        hidden_size=hidden_size,
        intermediate_size=require("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv") or num_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=float(require("attention.layer_norm_rms_epsilon")),
        rope=rope,
        max_position_embeddings=reach(rope, context),
        has_qk_norm=FAMILIES[family].has_qk_norm,
        has_qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
        has_o_bias="layers.0.self_attn.o_proj.bias" in tensors,
        has_mlp_bias="layers.0.mlp.gate_proj.bias" in tensors,
    )
    check_sizes(decoder, str(path))
    return replace(decoder, experts=_experts(require, decoder, path)) if FAMILIES[family].has_experts else decoder


def _experts(require: Getter, decoder: DecoderSpec, path: Path) -> ExpertsSpec:
    """In every layer, with probabilities that are made to sum to 1, as llama.cpp has the family."""
    keys = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    count, used, inner = (require(key) for key in keys)
    if any(type(each) is not int for each in (count, used, inner)) or not (0 < used <= count <= MAX_EXPERTS):
        raise CheckpointError(
            f"{path}: {', '.join(keys)}: expected numbers, the second no more than the first, found {count}, {used} "
            f"and {inner}; convert the model again"
        )
    return ExpertsSpec(tuple(range(decoder.num_layers)), count, used, inner, is_normalised=True)


def _permuted_heads(spec: TargetSpec, tensors: dict[str, Any]) -> dict[str, int]:
    if spec.family != "llama":
        return {}
    heads = {"q_proj": spec.decoder.num_heads, "k_proj": spec.decoder.num_kv_heads}
    return {name: heads[part] for name in tensors for part in heads if f".{part}." in name}
