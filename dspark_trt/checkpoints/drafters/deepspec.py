"""DeepSpec's dialect, which NeMo AutoModel writes too: `Qwen3DSparkModel` and `Gemma4DSparkModel`, every key at the top
level.

Anchor first, unless sample_from_anchor says otherwise; layer ids count from 0, and taps are Hugging Face's
`hidden_states[id + 1]`, so that the last layer's is normalised (NeMo hooks the final norm for it). Attention is
bidirectional over the whole context, unless keys of vLLM say otherwise, as in NVIDIA's Nemotron DSpark: causal,
sliding, with attention sinks. The layers of Gemma 4's drafter are all made like its target's full layers, and the soft
cap of its logits is for the base logits alone. Source: DeepSpec and NeMo AutoModel, their DSpark models and
target wrappers.
"""

from __future__ import annotations

from typing import Any

from dspark_trt.checkpoints.drafters.description import (
    ANCHOR_KEYS,
    Description,
    describe,
    flattened,
    stated_mask_first,
    without,
)
from dspark_trt.checkpoints.drafters.windows import read_windows
from dspark_trt.checkpoints.gemma4 import GemmaKeys, read_decoder
from dspark_trt.checkpoints.spec import BlockAttention, DecoderSpec
from dspark_trt.errors import CheckpointError

ARCHITECTURE = "Qwen3DSparkModel"
GEMMA4_ARCHITECTURE = "Gemma4DSparkModel"
DIALECT = "DeepSpec"
_FULL, _MAX_LAYERS = "full_attention", 1024
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"


def read(values: dict[str, Any], where: str) -> Description:
    """Raises CheckpointError as `describe` does."""
    return _read(values, where, ARCHITECTURE, None)


def read_gemma4(values: dict[str, Any], where: str) -> Description:
    """Raises CheckpointError as `describe` and `gemma4_decoder` do."""
    plain, decoder = gemma4_decoder(values, where, GEMMA4_ARCHITECTURE, is_causal=False)
    return _read(plain, where, GEMMA4_ARCHITECTURE, decoder)


def gemma4_decoder(
    values: dict[str, Any], where: str, architecture: str, *, is_causal: bool
) -> tuple[dict[str, Any], DecoderSpec]:
    """The other keys of a drafter whose layers are all made like Gemma 4's full ones, and these layers.

    Raises CheckpointError as `read_decoder` of Gemma 4 does, and for layers that slide.
    """
    types, num_layers = values.get("layer_types"), values.get("num_hidden_layers")
    if isinstance(types, list) and any(each != _FULL for each in types):
        raise CheckpointError(
            f"{where}: layer_types has {sorted(set(map(str, types)) - {_FULL})}: the layers of {architecture} "
            f"see the whole context; expected {_FULL} in all of them"
        )
    if types is None and isinstance(num_layers, int):
        types = [_FULL] * min(max(num_layers, 0), _MAX_LAYERS)
    if values.get("global_head_dim") is not None:  # which DeepSpec reads: the other may be a copy of the target's
        values = without(values, "per_layer_config")
    _, decoder = read_decoder({**values, "layer_types": types}, where, is_causal=is_causal)
    return without(values, *GemmaKeys.model_fields), decoder


def _read(values: dict[str, Any], where: str, architecture: str, decoder: DecoderSpec | None) -> Description:
    flat = flattened(values, "dflash_config", where)  # some exporters repeat keys there
    _check_aux_ids(flat, where)
    attention: tuple[BlockAttention, ...] = ()
    if architecture == ARCHITECTURE and any(flat.get(key) is True for key in ("use_swa", "attention_sink_bias")):
        attention, flat = read_windows(flat, where, is_sliding_causal=False)
    if flat.get("causal") is False:
        flat = without(flat, "causal")
    if flat.get("causal"):
        raise CheckpointError(
            f"{where}: causal = true: DeepSpec's {architecture} sees its whole block; remove the key, or use another "
            "architecture's name"
        )
    if (draft_vocab := flat.get("draft_vocab_size")) not in (None, flat.get("vocab_size")):
        raise CheckpointError(
            f"{where}: draft_vocab_size = {draft_vocab} is not vocab_size = {flat.get('vocab_size')}: DeepSpec's form "
            "has no reduced draft vocabulary; use the drafter in the speculators form, which has d2t and t2d"
        )
    return describe(
        without(flat, *ANCHOR_KEYS),
        where,
        dialect=DIALECT,
        is_mask_first=bool(stated_mask_first(flat, where)),
        is_last_tap_normed=True,
        decoder=decoder,
        block_attention=attention,
    )


def _check_aux_ids(values: dict[str, Any], where: str) -> None:
    """NVIDIA's exports repeat the tap layers as vLLM counts them, by what goes into a layer."""
    ids, of_inputs = values.get("target_layer_ids"), values.get(_AUX_IDS)
    if (
        isinstance(ids, list)
        and isinstance(of_inputs, list)
        and of_inputs != [each + 1 for each in ids if isinstance(each, int)]
    ):
        raise CheckpointError(
            f"{where}: {_AUX_IDS} = {of_inputs} is not target_layer_ids + 1 ({ids}), the layers whose outputs are "
            "tapped; target_layer_ids decides: remove the other key if it is wrong"
        )
