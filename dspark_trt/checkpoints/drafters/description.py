"""What a drafter's config.json says, whatever trainer wrote it, and the keys that all dialects have.

A dialect is how one trainer writes a block drafter down. They differ in where keys stand and in things that no tensor
shows: whether the anchor's position predicts, what a tap id counts, what the last layer's tap is, and what a layer
sees. Each dialect has a module of this room that turns a configuration into a `Description`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from dspark_trt.checkpoints.config import DecoderConfig, decoder_spec, parse, refuse_unsupported
from dspark_trt.checkpoints.spec import BlockAttention, BlockDrafterSpec, DecoderSpec, MarkovHeadType
from dspark_trt.errors import CheckpointError

_MAX_BLOCK = 1024  # beyond any drafter
_HINTS = {
    "target_layer_ids": "it says which target layers the drafter was trained on, and no default is right for another "
    "drafter: take the value from the training configuration",
    "block_size": "it is the number of positions of a block that the drafter was trained with",
    "mask_token_id": "it is the token that fills the block after the anchor; take it from the training configuration",
}


class DrafterConfig(DecoderConfig):
    """The keys that every dialect has in the end, under DeepSpec's names."""

    block_size: int = Field(ge=1, le=_MAX_BLOCK)
    mask_token_id: NonNegativeInt
    target_layer_ids: list[int] = Field(min_length=1)
    num_target_layers: PositiveInt | None = None
    markov_rank: NonNegativeInt | None = None
    markov_head_type: MarkovHeadType | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    draft_vocab_size: PositiveInt | None = None
    runtime_block_size: PositiveInt | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """One configuration. `spec` says what only tensors tell as the configuration does, or as if it were not there."""

    dialect: str
    spec: BlockDrafterSpec
    config: DrafterConfig
    is_confidence_told_by_tensors: bool = False  # where the key is absent
    rename: Callable[[str], str] = str  # of stored tensors to canonical names
    copies_of_target: tuple[str, ...] = ()  # tensors that only repeat the target's


def describe(
    values: Mapping[str, Any],
    where: str,
    *,
    dialect: str,
    is_mask_first: bool,
    is_last_tap_normed: bool,
    block_attention: tuple[BlockAttention, ...] = (),
    layer_ids_key: str = "target_layer_ids",
    layer_id_offset: int = 0,
    decoder: DecoderSpec | None = None,
    **more: Any,
) -> Description:
    """From the keys under DeepSpec's names, without those that the dialect has read itself.

    Args:
        layer_ids_key: how the dialect calls target_layer_ids, for messages.
        layer_id_offset: what one of its layer ids is above the number of the layer whose output it means.
        decoder: where the dialect has read its keys too; None: layers are Qwen3's.

    Raises CheckpointError for missing, wrong and unsupported keys.
    """
    plain = dict(values)
    refuse_unsupported(plain, where, is_causal=False)
    config = parse(DrafterConfig, plain, where, _HINTS | {layer_ids_key: _HINTS["target_layer_ids"]})
    gamma = config.block_size - is_mask_first
    if gamma < 1:
        raise CheckpointError(f"{where}: block_size = 1, and its only position is the anchor's: nothing is drafted")
    if config.runtime_block_size not in (None, config.block_size):
        raise CheckpointError(
            f"{where}: runtime_block_size = {config.runtime_block_size} is not block_size = {config.block_size}; "
            "remove it to draft whole blocks"
        )
    taps = tuple(each - layer_id_offset for each in config.target_layer_ids)
    if list(taps) != sorted(set(taps)):
        raise CheckpointError(
            f"{where}: {layer_ids_key} {config.target_layer_ids} are not strictly increasing; the columns of fc follow "
            "their order, so they must be written as trained"
        )
    for each in block_attention:
        if each.window is not None and each.window_from == "slot" and each.window < config.block_size:
            raise CheckpointError(
                f"{where}: sliding_window = {each.window} is less than block_size = {config.block_size}: trainers and "
                "engines disagree about what a slot sees then; expected a window of a block or more"
            )
    spec = BlockDrafterSpec(
        decoder=decoder or decoder_spec(config, "qwen3", where),
        gamma=gamma,
        mask_token_id=config.mask_token_id,
        target_layer_ids=taps,
        markov_rank=config.markov_rank or 0,
        markov_head_type=config.markov_head_type or "vanilla",
        has_confidence_head=bool(config.enable_confidence_head),
        has_confidence_bias=False,
        is_confidence_with_markov=bool(config.confidence_head_with_markov),
        has_own_embedding=False,
        has_own_head=False,
        num_target_layers=config.num_target_layers,
        is_last_tap_normed=is_last_tap_normed,
        is_mask_first=is_mask_first,
        block_attention=block_attention if any(each != BlockAttention() for each in block_attention) else (),
        draft_vocab_size=None if config.draft_vocab_size == config.vocab_size else config.draft_vocab_size,
    )
    return Description(dialect, spec, config, **more)


def flattened(values: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """`values` with what stands under `key` brought to the top; what stands in both places has to agree.

    Raises CheckpointError that names both keys.
    """
    nested = values.get(key)
    if nested is None:
        nested = {}
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{where}: {key}: expected an object, found {nested!r}; download the file again")
    flat = {name: value for name, value in values.items() if name != key}
    for name, value in nested.items():
        if name in flat and flat[name] is not None and value is not None and flat[name] != value:
            raise CheckpointError(
                f"{where}: {name} is {flat[name]!r} at the top level, but {value!r} in {key}; remove the wrong one"
            )
        if value is not None:
            flat[name] = value
    return flat


def stated_mask_first(values: Mapping[str, Any], where: str) -> bool | None:
    """What sample_from_anchor, its older form dspark_bonus_anchor and SpecForge's shift_label say; None: nothing.

    Raises CheckpointError where they contradict each other or are no truth values.
    """
    said: dict[str, bool] = {}
    for key, is_opposite in (("sample_from_anchor", True), ("dspark_bonus_anchor", False), ("shift_label", True)):
        value = values.get(key)
        if value is None:
            continue
        if not isinstance(value, bool):
            raise CheckpointError(f"{where}: {key}: expected true or false, found {value!r}; correct it")
        said[key] = value != is_opposite
    if len(set(said.values())) > 1:
        stated = ", ".join(f"{key} = {str(values[key]).lower()}" for key in said)
        raise CheckpointError(
            f"{where}: {stated} contradict each other: one says that the anchor's position predicts the first draft, "
            "the other that it predicts nothing; remove the wrong one"
        )
    return next(iter(said.values()), None)


ANCHOR_KEYS = ("sample_from_anchor", "dspark_bonus_anchor", "shift_label")


def without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """`values` without keys that were read."""
    return {name: value for name, value in values.items() if name not in keys}
