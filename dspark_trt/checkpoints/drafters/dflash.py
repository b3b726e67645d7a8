"""The dialects with a `dflash_config`: z-lab's and SpecForge's `DFlashDraftModel`, SpecForge's `DSparkDraftModel` and
NeMo AutoModel's `Qwen3DFlashDraftModel`.

Layer ids count from 0 and mean that layer's output. No embedding and no head are stored: they are the target's.

| | block | last layer's tap | sliding layers |
|---|---|---|---|
| z-lab, SpecForge DFlash | mask first (`shift_label`: anchor first) | normalised: `hidden_states[id + 1]` | causal |
| SpecForge DSpark | anchor first | the same | causal |
| NeMo DFlash | mask first | raw (a hook on the layer) | both ways |

Source: z-lab's dflash/model.py; SpecForge's draft and target models, masks and trainers; NeMo's dflash room.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from dspark_trt.checkpoints.config import parse
from dspark_trt.checkpoints.drafters.description import (
    ANCHOR_KEYS,
    Description,
    describe,
    flattened,
    stated_mask_first,
    without,
)
from dspark_trt.checkpoints.drafters.windows import read_windows
from dspark_trt.errors import CheckpointError

ZLAB, SPECFORGE, NEMO = "z-lab DFlash", "SpecForge DSpark", "NeMo DFlash"
_NESTED = "logit_head."  # where SpecForge's first exports have their heads
_TRAINING_KEYS = (  # of dflash_config: how it was trained changes nothing that it computes
    "confidence_head_alpha",
    "ce_loss_alpha",
    "l1_loss_alpha",
    "loss_decay_gamma",
    "loss_type",
    "num_anchors",
    "pure_draft_prefix_len",
)


class DFlashConfig(BaseModel):
    """The keys of `dflash_config`. An unknown one may change what the drafter computes, so it is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target_layer_ids: Any = None
    mask_token_id: Any = None
    block_size: Any = None
    projector_type: str | None = None
    attention_mode: str | None = None
    attention_modes: list[str] | None = None
    markov_rank: Any = None
    markov_head_type: Any = None
    enable_confidence_head: Any = None
    use_confidence_head: Any = None
    confidence_head_with_markov: Any = None
    sample_from_anchor: Any = None
    shift_label: Any = None
    causal: Any = None
    use_swa: Any = None
    swa_window_size: Any = None
    attention_sink_bias: Any = None


def read_zlab(values: dict[str, Any], where: str) -> Description:
    """Raises CheckpointError as `describe` does."""
    flat = _flat(values, where)
    stated = stated_mask_first(flat, where)
    return _read(flat, where, ZLAB, is_mask_first=stated is not False, is_last_tap_normed=True)


def read_specforge(values: dict[str, Any], where: str) -> Description:
    """Raises CheckpointError as `describe` does."""
    flat = _flat(values, where)
    return _read(
        flat,
        where,
        SPECFORGE,
        is_mask_first=bool(stated_mask_first(flat, where)),
        is_last_tap_normed=True,
        is_confidence_told_by_tensors=True,
        rename=lambda name: name.removeprefix(_NESTED),
    )


def read_nemo(values: dict[str, Any], where: str) -> Description:
    """Raises CheckpointError as `describe` does."""
    flat = _flat(values, where)
    stated = stated_mask_first(flat, where)
    return _read(
        flat, where, NEMO, is_mask_first=stated is not False, is_last_tap_normed=False, is_sliding_causal=False
    )


def _flat(values: dict[str, Any], where: str) -> dict[str, Any]:
    nested = values.get("dflash_config")
    if isinstance(nested, dict):
        hints = dict.fromkeys(nested, "a key of dflash_config that is not known may change what the drafter computes")
        parse(DFlashConfig, without(nested, *_TRAINING_KEYS), f"{where}: dflash_config", hints)
    flat = flattened(values, "dflash_config", where)
    several = flat.get("attention_modes")
    stated = [flat.get("attention_mode"), *(several if isinstance(several, list) else [several])]
    modes = {str(mode).lower() for mode in stated if mode is not None}
    if unknown := sorted(modes - {"gqa", "mha"}):
        raise CheckpointError(
            f"{where}: attention_mode {', '.join(unknown)} is not implemented (expected gqa or mha); use a drafter "
            "with one of those"
        )
    other_name = flat.pop("use_confidence_head", None)
    return flattened({**flat, "heads": {"enable_confidence_head": other_name}}, "heads", where)


def _read(
    flat: dict[str, Any],
    where: str,
    dialect: str,
    *,
    is_mask_first: bool,
    is_last_tap_normed: bool,
    is_sliding_causal: bool = True,
    **more: Any,
) -> Description:
    attention, plain = read_windows(flat, where, is_sliding_causal=is_sliding_causal)
    return describe(
        without(plain, *ANCHOR_KEYS),
        where,
        dialect=dialect,
        is_mask_first=is_mask_first,
        is_last_tap_normed=is_last_tap_normed,
        block_attention=attention,
        **more,
    )
