"""EAGLE-3 drafters in the forms of their trainers: what the keys mean, and the tensors under canonical names.

DeepSpec (`Qwen3Eagle3Model`, `Gemma4Eagle3Model`): target_layer_ids are layers whose outputs are tapped, the last one's
normalised; queries and keys are normalised. Community (EAGLE, SpecForge, AngelSlim: `LlamaForCausalLMEagle3`,
`Eagle3LlamaForCausalLM`, or `LlamaForCausalLM` with draft_vocab_size): eagle_config.eagle_aux_hidden_state_layer_ids
are outputs, and the layer is called `midlayer`. DART (`draft_length`): the same with `midlayer.mask_rep`, a vector that
stands for feature and embedding behind the last position (arXiv 2601.19278). speculators (speculators_model_type
eagle3): the layer's configuration is nested, and eagle_aux_hidden_state_layer_ids count what goes into a layer.

Where these forms but DeepSpec's name no layers, all their code takes the outputs of layers 1, n/2 - 1 and
n - 4 of n. Two keys mean different things to different trainers and are refused where they would have to be guessed:
norm_before_residual, whose absence speculators' code and vLLM's take for opposite values, and norm_output, which says
that the head reads normalised features to SpecForge, and that the next step does to speculators.

Source: the EAGLE-3 models of DeepSpec, EAGLE, SpecForge, AngelSlim, DART, speculators, vLLM and SGLang.
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
from dspark_trt.checkpoints.drafters.deepspec import gemma4_decoder
from dspark_trt.checkpoints.drafters.draft_ids import T2D, check_head, take_draft_ids
from dspark_trt.checkpoints.drafters.eagle3_forms import (
    MAX_DRAFTS,
    from_community,
    from_dart,
    from_speculators,
    is_dart,
)
from dspark_trt.checkpoints.drafters.shared import refuse_ambiguous_head, without_shared
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD, drafter_shapes
from dspark_trt.checkpoints.quantised import refuse_quantised
from dspark_trt.checkpoints.safetensors_store import open_safetensors
from dspark_trt.checkpoints.spec import (
    DecoderSpec,
    DrafterCheckpoint,
    Eagle3Spec,
    Family,
    TargetCheckpoint,
    TargetSpec,
)
from dspark_trt.errors import CheckpointError

DEFAULT_NUM_DRAFTS = 7  # where neither option nor checkpoint names a number
DEEPSPEC, DEEPSPEC_GEMMA4 = "Qwen3Eagle3Model", "Gemma4Eagle3Model"
_COMMUNITY = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_ARCHITECTURES = (DEEPSPEC, DEEPSPEC_GEMMA4, *_COMMUNITY)
_COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")
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
    ttt_length: int | None = Field(default=None, ge=1, le=MAX_DRAFTS)
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
    if is_dart(values):
        return True
    architectures = architectures_of(dict(values))
    is_bare = architectures == ["LlamaForCausalLM"] and values.get("draft_vocab_size") is not None
    return is_bare or (len(architectures) == 1 and architectures[0] in _ARCHITECTURES)


def read_eagle3_drafter(
    folder: Path, values: dict[str, Any], target: TargetCheckpoint, num_drafts: int | None
) -> DrafterCheckpoint:
    """Raises CheckpointError when it cannot be read, or when configuration and tensors disagree."""
    where = str(folder / "config.json")
    description = describe_eagle3(values, where, target.spec, num_drafts)
    weights = open_safetensors(folder, rename=_canonical).without(_COPIES)
    if description.spec.is_masked:  # whose code takes the target's embedding, and reads d2t alone
        weights = weights.without((EMBEDDING, T2D))
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
        flat, family, proposed = from_speculators(values, where)
        return _describe(flat, where, target, family, num_drafts or proposed, is_last_tap_normed=False)
    if is_dart(values):
        flat, num_drafts = from_dart(values, where, num_drafts)
        description = _describe(flat, where, target, "llama", num_drafts, is_last_tap_normed=False)
        return replace(description, spec=replace(description.spec, is_masked=True), is_head_tied=False)
    if architectures_of(values) == [DEEPSPEC]:
        return _describe(values, where, target, "qwen3", num_drafts, is_last_tap_normed=True, needs_ids=True)
    if architectures_of(values) == [DEEPSPEC_GEMMA4]:
        plain, layers = gemma4_decoder(values, where, DEEPSPEC_GEMMA4, is_causal=True)
        return _describe(plain, where, target, layers, num_drafts, is_last_tap_normed=True, needs_ids=True)
    return _describe(from_community(values, where), where, target, "llama", num_drafts, is_last_tap_normed=False)


def _describe(
    flat: dict[str, Any],
    where: str,
    target: TargetSpec,
    layers: Family | DecoderSpec,
    num_drafts: int | None,
    *,
    is_last_tap_normed: bool,
    needs_ids: bool = False,
) -> Eagle3Description:
    """From keys at the top level, under the names of Eagle3Config. layers: their family, or as they have been read."""
    refuse_unsupported(flat, where, is_causal=True)
    values = dict(flat)
    if values.get("target_layer_ids") is None and not needs_ids:
        num_layers = target.decoder.num_layers
        values["target_layer_ids"] = [1, num_layers // 2 - 1, num_layers - 4]
    config = parse(Eagle3Config, values, where, _HINTS)
    _check(config, where)
    decoder = layers if isinstance(layers, DecoderSpec) else decoder_spec(config, layers, where)
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
