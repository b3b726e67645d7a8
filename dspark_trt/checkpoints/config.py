"""config.json and generation_config.json: what is read, and what is refused because it would change the mathematics.

These are other people's files: unknown keys are allowed, but those of `neutral` that are not neutral are refused.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from dspark_trt.checkpoints.checks import check_sizes
from dspark_trt.checkpoints.families import FAMILIES, FULL
from dspark_trt.checkpoints.neutral import NEUTRAL_VALUES
from dspark_trt.checkpoints.opening import check_file
from dspark_trt.checkpoints.rope import RopeParameters, WholeNumber, reach, rope_spec
from dspark_trt.checkpoints.spec import DecoderSpec, Family, GenerationDefaults, RopeSpec
from dspark_trt.errors import CheckpointError, abridged, place

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

_RMS_NORM_EPS = 1e-6  # what the format says when the key is not written

_MAX_FILE_BYTES = 1 << 27  # of a JSON file: the largest tokenizers have some 30 MB


class DecoderConfig(BaseModel):
    """The keys that a decoder stack is made from, in every family."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=(), allow_inf_nan=False)

    architectures: list[str] | None = None
    model_type: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = _RMS_NORM_EPS
    max_position_embeddings: WholeNumber | None = None
    original_max_position_embeddings: WholeNumber | None = None
    attention_bias: bool = False
    qkv_bias: bool = True  # qwen2_moe
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    rope_theta: PositiveFloat | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    layer_types: list[str] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28


class GenerationConfig(BaseModel):
    """The keys of generation_config.json that become defaults of a request."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    do_sample: bool | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_k: int | None = Field(default=None, ge=-1)  # -1 and 0: off
    top_p: float | None = Field(default=None, ge=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: PositiveFloat | None = None
    eos_token_id: int | list[int] | None = None

    def defaults(self) -> GenerationDefaults:
        """Greedy unless `do_sample` is true. What the file does not state is off (transformers would take top_k 50)."""
        temperature = 1.0 if self.temperature is None else self.temperature
        is_greedy = not self.do_sample or self.top_p == 0  # which leaves the most probable token alone
        return GenerationDefaults(
            temperature=0.0 if is_greedy else float(temperature),
            top_k=max(self.top_k or 0, 0),
            top_p=float(self.top_p or 1.0),
            min_p=float(self.min_p or 0.0),
            repetition_penalty=float(self.repetition_penalty or 1.0),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError when the file is absent, is not JSON or is not an object."""
    check_file(path)
    try:
        if (size := path.stat().st_size) > _MAX_FILE_BYTES:
            raise CheckpointError(f"{path}: {size} bytes are no configuration (expected {_MAX_FILE_BYTES} or fewer)")
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent}: no {path.name}; expected a Hugging Face checkpoint folder (config.json, *.safetensors, "
            "tokenizer.json) or, for the target, the path of a .gguf file"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); check the path") from None
    except (ValueError, RecursionError) as error:  # of a number of thousands of digits, of thousands of brackets
        raise CheckpointError(f"{path}: not valid JSON ({error}); download the file again") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(values).__name__}; download the file again")
    return values


def parse(model: type[Model], values: dict[str, Any], where: str, hints: dict[str, str] | None = None) -> Model:
    """Validate `values`; null is as good as absent.

    Raises CheckpointError that names the key, what was found and what to do (from `hints`).
    """
    try:
        return model.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        key = place(first["loc"])
        hint = (hints or {}).get(place(first["loc"][:1]), "compare it with the configuration of a published checkpoint")
        if first["type"] == "missing":
            raise CheckpointError(f"{where}: {key} is missing; {hint}") from None
        if first["type"] == "extra_forbidden":
            raise CheckpointError(f"{where}: {key} = {_short(first['input'])} is not implemented; {hint}") from None
        raise CheckpointError(f"{where}: {key}: {first['msg']}, found {_short(first['input'])}; {hint}") from None


def refuse_unsupported(values: dict[str, Any], where: str, *, is_causal: bool) -> None:
    """Raises CheckpointError when a key says that the model computes something that is not implemented.

    `is_causal` is what the attention of this kind of model is here: true for targets, false inside a draft block.
    """
    neutral = {**NEUTRAL_VALUES, "is_causal": (is_causal,)}
    for key, value in values.items():
        if key in neutral and value is not None and value not in neutral[key]:
            accepted = ", ".join(map(repr, neutral[key]))
            expected = f"{accepted} or no such key" if accepted else "no such key"
            raise CheckpointError(
                f"{where}: {key} = {_short(value)} is not implemented (expected {expected}); ignoring it would change "
                "the output, so use a checkpoint without it"
            )


def architectures_of(values: dict[str, Any]) -> list[str]:
    """`architectures` as a list, also where a hand-written configuration has one name in the place of a list."""
    found = values.get("architectures") or []
    return [abridged(each).strip("'") for each in (found if isinstance(found, list) else [found])]


def decoder_spec(config: DecoderConfig, family: Family, where: str, *, are_windows_read: bool = False) -> DecoderSpec:
    """Without the windows of its layers, which are refused unless somebody else reads them.

    Raises CheckpointError for sliding windows in use, rope variants and head counts that do not divide.
    """
    facts = FAMILIES[family]
    if not are_windows_read:
        _refuse_windows(config, where)
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads = {config.num_attention_heads} is not a multiple of num_key_value_heads = "
            f"{num_kv_heads}; the configuration does not belong to a checkpoint"
        )
    head_dim = config.head_dim or facts.head_dim or config.hidden_size // config.num_attention_heads
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim = {head_dim} is odd; rotary embedding needs an even one")
    max_positions = config.max_position_embeddings or facts.max_positions
    rope = _rope(config, max_positions, facts.theta, where)
    decoder = DecoderSpec(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=float(config.rms_norm_eps),
        rope=rope,
        max_position_embeddings=reach(rope, max_positions),
        has_qk_norm=facts.has_qk_norm,
        has_qkv_bias=_has_qkv_bias(config, family),
        has_o_bias=config.attention_bias and facts.has_qkv_bias is None,
        has_mlp_bias=config.mlp_bias if facts.has_mlp_bias is None else facts.has_mlp_bias,
    )
    check_sizes(decoder, where)
    return decoder


def _has_qkv_bias(config: DecoderConfig, family: Family) -> bool:
    if family == "qwen2_moe":
        return config.qkv_bias
    facts = FAMILIES[family]
    return config.attention_bias if facts.has_qkv_bias is None else facts.has_qkv_bias


def eos_token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """Every end-of-sequence id of the given keys, in order, each once; negative ones stand for none."""
    ids = [token for value in values for token in (value if isinstance(value, list) else [value]) if token is not None]
    return tuple(dict.fromkeys(token for token in ids if token >= 0))


def known_token(token: int | None, vocab_size: int, where: str) -> int | None:
    """None for a token outside of the vocabulary, which was shrunk then: no text holds it."""
    if token is None or 0 <= token < vocab_size:
        return token
    logger.warning("%s: token %d (bos_token_id) is outside the vocabulary of %d and left out", where, token, vocab_size)
    return None


def _rope(config: DecoderConfig, max_positions: int, default_theta: float, where: str) -> RopeSpec:
    specs = [
        rope_spec(
            parameters,
            theta=config.rope_theta,
            default_theta=default_theta,
            original=config.original_max_position_embeddings,
            max_position_embeddings=max_positions,
            where=where,
        )
        for parameters in (config.rope_scaling, config.rope_parameters)
        if parameters is not None
    ] or [RopeSpec(float(config.rope_theta or default_theta))]
    if len(set(specs)) > 1:
        raise CheckpointError(f"{where}: rope_scaling and rope_parameters contradict each other; remove the wrong one")
    return specs[0]


def _refuse_windows(config: DecoderConfig, where: str) -> None:
    first = config.max_window_layers
    is_used = config.use_sliding_window and config.sliding_window and first < config.num_hidden_layers
    layer_types = set(config.layer_types or ()) - {FULL}
    if is_used or layer_types:
        window = f"use_sliding_window, window {config.sliding_window}"
        found = f"layer_types has {sorted(layer_types)}" if layer_types else window
        raise CheckpointError(
            f"{where}: {found}: a sliding window is not implemented in this form of drafter (expected full attention "
            "in every layer); ignoring it would change the drafts, so use a checkpoint without it"
        )


def _short(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
