"""The forms of EAGLE-3 configurations, brought to the keys that all have in the end (see `eagle3`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_trt.checkpoints.config import architectures_of
from dspark_trt.checkpoints.drafters.description import flattened, without
from dspark_trt.checkpoints.spec import Family
from dspark_trt.errors import CheckpointError

DART = "LlamaForCausalLMDart"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MAX_DRAFTS = 64
_NESTED = "transformer_layer_config"


def from_community(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Raises CheckpointError for keys that mean different things to different trainers, and for EAGLE-1."""
    if values.get("norm_output") is not None:
        raise CheckpointError(
            f"{where}: norm_output = {values['norm_output']!r}: to SpecForge it says that the head reads normalised "
            "features, to speculators that the next step is fed them; remove the key if the drafter was trained as "
            "EAGLE-3 is (normalised for the head, not for the next step), or write it down in the speculators form"
        )
    if values.get(LAYER_IDS) is not None:
        raise CheckpointError(
            f"{where}: {LAYER_IDS} at the top level: speculators' loaders count what goes into a layer, SpecForge and "
            "SGLang count outputs; write the layers whose outputs were trained on under eagle_config"
        )
    flat = flattened(values, "eagle_config", where)
    if flat.pop("use_aux_hidden_state", True) is not True:
        raise CheckpointError(
            f"{where}: eagle_config.use_aux_hidden_state is not true: that is EAGLE-1 with a head of EAGLE-3, which is "
            "not supported"
        )
    ids = flat.pop(LAYER_IDS, None)
    return flat if ids is None else {**flat, "target_layer_ids": ids}


def is_dart(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is DART's: EAGLE-3's keys and the number of masks."""
    return values.get("draft_length") is not None or architectures_of(dict(values)) == [DART]


def from_dart(values: dict[str, Any], where: str, num_drafts: int | None) -> tuple[dict[str, Any], int]:
    """The keys, and how many drafts there are: one at the last position, and one for each mask.

    Raises CheckpointError for another number of masks, and for more drafts than that.
    """
    masks = values.get("draft_length")
    if not isinstance(masks, int) or isinstance(masks, bool) or not 1 <= masks < MAX_DRAFTS:
        raise CheckpointError(
            f"{where}: draft_length: expected the number of masks of a DART drafter, 1 to {MAX_DRAFTS - 1}, found "
            f"{masks!r}; take it from the training configuration"
        )
    if (num_drafts or 0) > masks + 1:
        raise CheckpointError(
            f"{where}: num_drafts: {num_drafts} drafts of a DART drafter that was trained for {masks + 1} "
            f"(draft_length + 1); give --num-drafts {masks + 1} or less"
        )
    return without(values, "draft_length"), num_drafts or masks + 1


def from_speculators(values: dict[str, Any], where: str) -> tuple[dict[str, Any], Family, int | None]:
    """Keys of the layer at the top, its family, and the number of drafts that the export proposes.

    Raises CheckpointError for keys that are missing, wrong or ambiguous.
    """
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
    flat = {**without(layer, "target_layer_ids", LAYER_IDS), **own}
    ids = values.get(LAYER_IDS)
    if isinstance(ids, list) and all(isinstance(each, int) for each in ids):
        flat["target_layer_ids"] = [each - 1 for each in ids]  # what went into layer i is the output of i - 1
    elif ids is not None:
        raise CheckpointError(f"{where}: {LAYER_IDS}: expected a list of layer numbers, found {ids!r}; correct it")
    try:
        proposed = values["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        proposed = None  # says nothing
    is_usable = isinstance(proposed, int) and not isinstance(proposed, bool) and 1 <= proposed <= MAX_DRAFTS
    return flat, families[model_type], proposed if is_usable else None


_SPECULATORS_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)
