"""Language models as drafters: any checkpoint that is read as a target, and PARD's, which have mask tokens.

A model with fewer rows of its embedding than the target has a draft vocabulary: the ids below. Rows beyond the
target's vocabulary are left out. Whether equal ids are equal tokens is for `vocabularies` to say, from the tokenizers.

PARD (`pard_token` in the configuration of an ordinary checkpoint): one mask token, which stands at every
place behind the anchor; attention is the model's own, causal one. `spd_type`, where it is written, is `pard`.
Source: PARD (arXiv 2504.18583), its training and inference code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark_trt.checkpoints.checks import check_tensors
from dspark_trt.checkpoints.config import architectures_of
from dspark_trt.checkpoints.drafters.eagle3 import DEFAULT_NUM_DRAFTS
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD, drafter_shapes
from dspark_trt.checkpoints.safetensors_store import open_safetensors
from dspark_trt.checkpoints.spec import (
    DrafterCheckpoint,
    LanguageModelSpec,
    TargetCheckpoint,
    TargetSpec,
    WeightStore,
)
from dspark_trt.checkpoints.target import TARGET_ARCHITECTURES, read_target, read_target_spec
from dspark_trt.checkpoints.views import FirstRows
from dspark_trt.errors import CheckpointError

# keys of drafters that call their architecture as a language model's
_OTHER_DRAFTERS = ("draft_vocab_size", "eagle_config", "ttt_length", "medusa_num_heads", "speculators_config")
_MASK, _KIND = "pard_token", "spd_type"


def is_language_model(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a plain language model, or of PARD's."""
    architectures = architectures_of(dict(values))
    is_known = len(architectures) == 1 and architectures[0] in TARGET_ARCHITECTURES.values()
    return is_known and all(values.get(key) is None for key in _OTHER_DRAFTERS)


def describe_language_model(
    path: Path, values: Mapping[str, Any], target: TargetSpec, num_drafts: int | None
) -> LanguageModelSpec:
    """What the configuration says of the model at `path`, a folder or a GGUF file (which has no other `values`).

    Raises CheckpointError as `read_target_spec` does, and for a mask token that the model does not have.
    """
    return _spec(read_target_spec(str(path)), _mask_token_id(values, str(path)), target, num_drafts, str(path))


def read_language_model(
    path: Path, values: Mapping[str, Any], target: TargetCheckpoint, num_drafts: int | None
) -> DrafterCheckpoint:
    """Raises CheckpointError as `read_target` does, and for a mask token that the model does not have."""
    if path.is_dir():
        _refuse_eagle(path)
    mask_token_id = _mask_token_id(values, str(path))
    model = read_target(str(path))
    spec = _spec(model.spec, mask_token_id, target.spec, num_drafts, str(path))
    weights: WeightStore = model.weights
    num_ids = spec.num_draft_ids
    if model.spec.decoder.vocab_size > num_ids:
        weights = FirstRows(weights, (EMBEDDING, HEAD), num_ids)
    check_tensors(weights, drafter_shapes(spec), str(path))
    ids = None if spec.draft_vocab_size is None else np.arange(num_ids, dtype=np.int64)
    return DrafterCheckpoint(spec, weights, ids)


def _spec(
    model: TargetSpec, mask_token_id: int | None, target: TargetSpec, num_drafts: int | None, where: str
) -> LanguageModelSpec:
    own_size, vocab_size = model.decoder.vocab_size, target.decoder.vocab_size
    num_ids = min(own_size, vocab_size)
    if mask_token_id is not None and mask_token_id >= num_ids:
        raise CheckpointError(
            f"{where}: {_MASK} = {mask_token_id}, but the ids of drafter and target end at {num_ids - 1}; use the "
            "target family that the drafter was trained for"
        )
    return LanguageModelSpec(
        decoder=replace(model.decoder, vocab_size=vocab_size),
        gamma=num_drafts or DEFAULT_NUM_DRAFTS,
        target_layer_ids=(),
        has_own_embedding=True,
        has_own_head=not model.is_head_tied,
        draft_vocab_size=own_size if own_size < vocab_size else None,
        is_head_tied=model.is_head_tied,
        mask_token_id=mask_token_id,
    )


def _mask_token_id(values: Mapping[str, Any], where: str) -> int | None:
    """None for a model that drafts one token after the other. Raises CheckpointError for a doubtful one."""
    mask, kind = values.get(_MASK), values.get(_KIND)
    if kind not in (None, "pard"):
        raise CheckpointError(
            f"{where}: {_KIND} = {kind!r} is not supported; expected 'pard' or no such key"
            + ("; PARD-2 reads hidden states of its target" if "pard" in str(kind).lower() else "")
        )
    if mask is None and kind is None:
        return None
    if isinstance(mask, bool) or not isinstance(mask, int) or mask < 0:
        raise CheckpointError(
            f"{where}: {_MASK}: expected the id of the mask token, found {mask!r}; take it from unused_tokenids of the "
            "training configuration"
        )
    return mask


def _refuse_eagle(folder: Path) -> None:
    """EAGLE-1 and 2 call their one layer a language model too."""
    if "fc.weight" in open_safetensors(folder, rename=str).names():
        raise CheckpointError(
            f"{folder}: the file has fc.weight: this drafter is in the form of EAGLE-1 or 2, which is not supported; "
            "use a language model, or an EAGLE-3 drafter"
        )
