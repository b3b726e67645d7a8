"""EAGLE-3 drafters in the forms of their trainers: what the keys mean, and the tensors under canonical names.

DeepSpec (`Qwen3Eagle3Model`): target_layer_ids are layers whose outputs are tapped, the last one's normalised; queries
and keys are normalised. Community (EAGLE, SpecForge, AngelSlim: `LlamaForCausalLMEagle3`, `Eagle3LlamaForCausalLM`, or
`LlamaForCausalLM` with draft_vocab_size): eagle_config.eagle_aux_hidden_state_layer_ids are outputs, and the layer is
called `midlayer`. speculators (speculators_model_type eagle3): the layer's configuration is nested, and
eagle_aux_hidden_state_layer_ids count what goes into a layer.

Where the community's form and speculators' name no layers, all their code takes the outputs of layers 1, n/2 - 1 and
n - 4 of n. Two keys mean different things to different trainers and are refused where they would have to be guessed:
norm_before_residual, whose absence speculators' code and vLLM's take for opposite values, and norm_output, which says
that the head reads normalised features to SpecForge, and that the next step does to speculators.

Source: the EAGLE-3 models of DeepSpec, EAGLE, SpecForge, AngelSlim, speculators, vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from dspark_trt.checkpoints.checks import check_tensors
from dspark_trt.checkpoints.config import (
    DecoderConfig,
    architectures_of,
    decoder_spec,
    parse,
    refuse_unsupported,
)
from dspark_trt.checkpoints.drafters.description import flattened, without
from dspark_trt.checkpoints.drafters.draft_ids import check_head, take_draft_ids
from dspark_trt.checkpoints.drafters.shared import refuse_ambiguous_head, without_shared
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD, drafter_shapes
from dspark_trt.checkpoints.quantised import refuse_quantised
from dspark_trt.checkpoints.safetensors_store import open_safetensors
from dspark_trt.checkpoints.spec import DrafterCheckpoint, Eagle3Spec, Family, TargetCheckpoint, TargetSpec
from dspark_trt.errors import CheckpointError

DEFAULT_NUM_DRAFTS = 7  # where neither option nor checkpoint names a number
DEEPSPEC = "Qwen3Eagle3Model"
_COMMUNITY = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED = "transformer_layer_config"
_COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")
_MAX_DRAFTS = 64
_HINTS = {
    "target_layer_ids": "it says which target layers the drafter was trained on, and no default is right for another "
    "drafter: take the value from the training configuration",
}


class Eagle3Config(DecoderConfig):
    """The keys that every form has in the end."""

    target_layer_ids: list[int] = Field(min_length=1)
    num_target_layers: PositiveInt | None = None
    draft_vocab_size: PositiveInt | None = None
    target_hidden_size: PositiveInt | None = None
    ttt_length: int | None = Field(default=None, ge=1, le=_MAX_DRAFTS)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True, slots=True)
class Eagle3Description:
    """One configuration. `spec` says of embedding and head as if the file had none of its own."""

    spec: Eagle3Spec
    is_head_tied: bool


def is_eagle3(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is in one of the forms of this module."""
    if (kind := values.get("speculators_model_type")) is not None:
        return bool(kind == "eagle3")
    architectures = architectures_of(dict(values))
    is_bare = architectures == ["LlamaForCausalLM"] and values.get("draft_vocab_size") is not None
    return is_bare or (len(architectures) == 1 and architectures[0] in (DEEPSPEC, *_COMMUNITY))


def read_eagle3_drafter(
    folder: Path, values: dict[str, Any], target: TargetCheckpoint, num_drafts: int | None
) -> DrafterCheckpoint:
    """Raises CheckpointError when it cannot be read, or when configuration and tensors disagree."""
    where = str(folder / "config.json")
    description = describe_eagle3(values, where, target.spec, num_drafts)
    weights = open_safetensors(folder, rename=_canonical).without(_COPIES)
    refuse_quantised({}, weights.names(), str(folder))
    check_head(description.spec, weights.names(), where)
    draft_ids, weights = take_draft_ids(description.spec, weights, where)
    if description.is_head_tied:
        refuse_ambiguous_head(weights, target, where)
    weights = without_shared(weights, target)
    names = weights.names()
    spec = replace(description.spec, has_own_embedding=EMBEDDING in names, has_own_head=HEAD in names)
    check_tensors(weights, drafter_shapes(spec), str(folder))
    return DrafterCheckpoint(spec, weights, draft_ids)


def describe_eagle3(
    values: dict[str, Any], where: str, target: TargetSpec, num_drafts: int | None
) -> Eagle3Description:
    """What config.json says. `num_drafts` is gamma where it is given.

    Raises CheckpointError for missing, wrong, ambiguous and unsupported keys.
    """
    if values.get("speculators_model_type") is not None:
        flat, family, proposed = _speculators(values, where)
        return _describe(flat, where, target, family, num_drafts or proposed, is_last_tap_normed=False)
    if architectures_of(values) == [DEEPSPEC]:
        return _describe(values, where, target, "qwen3", num_drafts, is_last_tap_normed=True, needs_ids=True)
    return _describe(_community(values, where), where, target, "llama", num_drafts, is_last_tap_normed=False)


def _community(values: dict[str, Any], where: str) -> dict[str, Any]:
    if values.get("norm_output") is not None:
        raise CheckpointError(
            f"{where}: norm_output = {values['norm_output']!r}: to SpecForge it says that the head reads normalised "
            "features, to speculators that the next step is fed them; remove the key if the drafter was trained as "
            "EAGLE-3 is (normalised for the head, not for the next step), or write it down in the speculators form"
        )
    if values.get(_IDS) is not None:
        raise CheckpointError(
            f"{where}: {_IDS} at the top level: speculators' loaders count what goes into a layer, SpecForge and "
            "SGLang count outputs; write the layers whose outputs were trained on under eagle_config"
        )
    flat = flattened(values, "eagle_config", where)
    if flat.pop("use_aux_hidden_state", True) is not True:
        raise CheckpointError(
            f"{where}: eagle_config.use_aux_hidden_state is not true: that is EAGLE-1 with a head of EAGLE-3, which is "
            "not supported"
        )
    ids = flat.pop(_IDS, None)
    return flat if ids is None else {**flat, "target_layer_ids": ids}


def _speculators(values: dict[str, Any], where: str) -> tuple[dict[str, Any], Family, int | None]:
    """Keys of the layer at the top, its family, and the number of drafts that the export proposes."""
    layer = values.get(_NESTED)
    if not isinstance(layer, dict):
        raise CheckpointError(
            f"{where}: {_NESTED} is missing: it holds the sizes of the drafter's layer; download the file again"
        )
    if not isinstance(values.get("norm_before_residual"), bool):
        raise CheckpointError(
            f"{where}: norm_before_residual: expected true or false, found {values.get('norm_before_residual')!r}: it "
            "says where the residual stream starts, and loaders take its absence for opposite values; take it from the "
            "training configuration"
        )
    families: dict[Any, Family] = {"llama": "llama", "qwen3": "qwen3"}
    model_type = layer.get("model_type")
    if not isinstance(model_type, str) or model_type not in families:
        raise CheckpointError(f"{where}: {_NESTED}.model_type: expected llama or qwen3, found {model_type!r}")
    own = {key: values[key] for key in _SPECULATORS_KEYS if values.get(key) is not None}
    flat = {**without(layer, "target_layer_ids", _IDS), **own}
    ids = values.get(_IDS)
    if isinstance(ids, list) and all(isinstance(each, int) for each in ids):
        flat["target_layer_ids"] = [each - 1 for each in ids]  # what went into layer i is the output of i - 1
    elif ids is not None:
        raise CheckpointError(f"{where}: {_IDS}: expected a list of layer numbers, found {ids!r}; correct it")
    try:
        proposed = values["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        proposed = None  # says nothing
    is_usable = isinstance(proposed, int) and not isinstance(proposed, bool) and 1 <= proposed <= _MAX_DRAFTS
    return flat, families[model_type], proposed if is_usable else None


_SPECULATORS_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)


def _describe(
    flat: dict[str, Any],
    where: str,
    target: TargetSpec,
    family: Family,
    num_drafts: int | None,
    *,
    is_last_tap_normed: bool,
    needs_ids: bool = False,
) -> Eagle3Description:
    """From keys at the top level, under the names of Eagle3Config."""
    refuse_unsupported(flat, where, is_causal=True)
    values = dict(flat)
    if values.get("target_layer_ids") is None and not needs_ids:
        num_layers = target.decoder.num_layers
        values["target_layer_ids"] = [1, num_layers // 2 - 1, num_layers - 4]
    config = parse(Eagle3Config, values, where, _HINTS)
    _check(config, where)
    decoder = decoder_spec(config, family, where)
    if decoder.rope.rope_type == "default":
        # many say 2048, the length of the texts that they were trained on; plain rotation goes on behind it
        reach = max(decoder.max_position_embeddings, target.decoder.max_position_embeddings)
        decoder = replace(decoder, max_position_embeddings=reach)
    spec = Eagle3Spec(
        decoder=decoder,
        gamma=num_drafts or config.ttt_length or DEFAULT_NUM_DRAFTS,
        target_layer_ids=tuple(config.target_layer_ids),
        has_own_embedding=False,
        has_own_head=False,
        num_target_layers=config.num_target_layers,
        is_last_tap_normed=is_last_tap_normed,
        draft_vocab_size=None if config.draft_vocab_size == config.vocab_size else config.draft_vocab_size,
        is_residual_normed=config.norm_before_residual,
        is_output_normed=config.norm_output,
        tap_norm="joint" if config.norm_before_fc else "each" if config.fc_norm else "none",
    )
    return Eagle3Description(spec, config.tie_word_embeddings)


def _check(config: Eagle3Config, where: str) -> None:
    if config.num_hidden_layers != 1:
        raise CheckpointError(
            f"{where}: num_hidden_layers = {config.num_hidden_layers}: an EAGLE-3 drafter of several layers is not "
            "supported (expected 1)"
        )
    if config.target_hidden_size not in (None, config.hidden_size):
        raise CheckpointError(
            f"{where}: target_hidden_size = {config.target_hidden_size} is not hidden_size = {config.hidden_size}; "
            "expected a drafter as wide as its target"
        )
    if config.norm_before_fc and config.fc_norm:
        raise CheckpointError(f"{where}: norm_before_fc and fc_norm exclude each other; remove the wrong one")
    ids = config.target_layer_ids
    if ids != sorted(set(ids)):
        raise CheckpointError(
            f"{where}: the tap layers {ids} are not strictly increasing; the columns of fc follow their order, so they "
            "must be written as trained, and a target of fewer than 7 layers has no default ones"
        )


def _canonical(name: str) -> str:
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
