"""Medusa: heads on the target's last hidden state, as a chain: head i proposes the draft i + 1 (arXiv 2401.10774).

All trainers read the state behind the target's final norm. The state of a position predicts the next token by the
target's own head, and by head 0 the one after it: so head 0, on the last position before the anchor, makes the first
draft. A head is `medusa_num_layers` residual blocks, x + SiLU(linear(x)), and a matrix onto the vocabulary.

Medusa's own form (also of TGI, TensorRT-LLM, Axolotl): medusa_lm_head.safetensors with `{head}.{block}.linear` and
`{head}.{medusa_num_layers}.weight`, perhaps behind `medusa_head.`; config.json has medusa_num_heads. vLLM's form
(`MedusaModel`): `blocks.{head}.layers.{block}` and `lm_heads.{head}`, in its configuration num_heads and
num_hidden_layers; original_lm_head: one matrix for all heads; truncated_vocab_size with the tensor token_map: ids of
the rows. Source: the code of Medusa, TensorRT-LLM and vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from dspark_trt.checkpoints.checks import check_tensors
from dspark_trt.checkpoints.config import architectures_of, parse, refuse_unsupported
from dspark_trt.checkpoints.drafters.shared import without_shared
from dspark_trt.checkpoints.layout import HEAD, drafter_shapes
from dspark_trt.checkpoints.quantised import refuse_quantised
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore, open_safetensors
from dspark_trt.checkpoints.spec import DrafterCheckpoint, MedusaSpec, TargetCheckpoint, TargetSpec, WeightStore
from dspark_trt.checkpoints.views import SelectedRows
from dspark_trt.errors import CheckpointError

ARCHITECTURE = "MedusaModel"
TOKEN_MAP = "token_map"
_FIRST_BIAS = "heads.0.blocks.0.bias"
_NAMES = (  # stored names of both forms -> canonical ones
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), r"heads.\1.lm_head.weight"),
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"heads.\1.lm_head.weight"),
)
_HINTS = {"medusa_num_heads": "it is the number of heads in the file (num_heads in vLLM's form)"}
_PREFIX = re.compile(r"(medusa_heads?|medusa)\.")


class MedusaConfig(BaseModel):
    """The keys of both forms, under the names of Medusa's own."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=(), allow_inf_nan=False)

    medusa_num_heads: int = Field(ge=1, le=16)
    medusa_num_layers: int = Field(default=1, ge=0, le=64)
    hidden_size: PositiveInt | None = None
    vocab_size: PositiveInt | None = None
    truncated_vocab_size: PositiveInt | None = None
    medusa_fc_bias: bool | None = None
    original_lm_head: bool = False


@dataclass(frozen=True, slots=True)
class _Description:
    spec: MedusaSpec
    config: MedusaConfig


def is_medusa(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is in one of the forms of this module."""
    is_stated = values.get("medusa_num_heads") is not None or values.get("model_type") == "medusa"
    return is_stated or architectures_of(dict(values)) == [ARCHITECTURE]


def describe_medusa(values: dict[str, Any], where: str, target: TargetSpec, num_drafts: int | None) -> MedusaSpec:
    """What config.json says; of tensors, that residual blocks have biases and a shared matrix is the target's.

    `num_drafts`: how many of the heads are used. Raises CheckpointError for wrong and unsupported keys, and for more
    drafts than there are heads.
    """
    return _describe(values, where, target, num_drafts).spec


def read_medusa(
    folder: Path, values: dict[str, Any], target: TargetCheckpoint, num_drafts: int | None
) -> DrafterCheckpoint:
    """Raises CheckpointError when it cannot be read, or when configuration and tensors disagree."""
    where = str(folder / "config.json")
    description = _describe(values, where, target.spec, num_drafts)
    spec, config = description.spec, description.config
    weights = open_safetensors(folder, rename=lambda name: _canonical(name, is_head_shared=spec.is_head_shared))
    refuse_quantised({}, weights.names(), str(folder))
    _check_num_heads(config, weights, where)
    has_bias = _FIRST_BIAS in weights.names()
    if config.medusa_num_layers and config.medusa_fc_bias not in (None, has_bias):
        raise CheckpointError(
            f"{where}: medusa_fc_bias is {config.medusa_fc_bias}, but the first bias of a residual block is "
            f"{'there' if has_bias else 'missing'}; correct the key or download the weights again"
        )
    token_map = _token_map(spec, weights, where)
    weights = weights.without([TOKEN_MAP, *(name for name in weights.names() if _head_number(name) >= spec.gamma)])
    if token_map is None:
        weights = without_shared(weights, target)
    spec = replace(spec, has_block_bias=has_bias, has_own_head=HEAD in weights.names())
    store: WeightStore = weights
    if token_map is not None:
        store = SelectedRows(weights, {name: _rows(weights, name, token_map) for name in _head_matrices(weights)})
    check_tensors(store, drafter_shapes(spec), str(folder))
    return DrafterCheckpoint(spec, store, None if token_map is None else np.sort(token_map))


def _describe(values: dict[str, Any], where: str, target: TargetSpec, num_drafts: int | None) -> _Description:
    refuse_unsupported(values, where, is_causal=True)
    config = parse(MedusaConfig, _own_names(values), where, _HINTS)
    for key, found, expected in (
        ("hidden_size", config.hidden_size, target.decoder.hidden_size),
        ("vocab_size", config.vocab_size, target.decoder.vocab_size),
    ):
        if found not in (None, expected):
            raise CheckpointError(
                f"{where}: {key} = {found}, but the target has {expected}; use the target that the heads were trained "
                f"for ({values.get('base_model_name_or_path') or 'the file does not name it'})"
            )
    if (num_drafts or 0) > config.medusa_num_heads:
        raise CheckpointError(
            f"{where}: num_drafts: {num_drafts} drafts of {config.medusa_num_heads} heads (medusa_num_heads): a head "
            f"makes one; give --num-drafts {config.medusa_num_heads} or less"
        )
    vocab_size, size = target.decoder.vocab_size, config.truncated_vocab_size
    spec = MedusaSpec(
        decoder=replace(target.decoder, num_layers=0),
        gamma=num_drafts or config.medusa_num_heads,
        target_layer_ids=(target.decoder.num_layers - 1,),
        has_own_embedding=False,
        has_own_head=False,
        draft_vocab_size=size if size is not None and size < vocab_size else None,
        num_blocks=config.medusa_num_layers,
        has_block_bias=True,
        is_head_shared=config.original_lm_head,
    )
    return _Description(spec, config)


def _own_names(values: dict[str, Any]) -> dict[str, Any]:
    """vLLM's keys under Medusa's names."""
    own = dict(values)
    if architectures_of(values) == [ARCHITECTURE] or values.get("model_type") == "medusa":
        for key, name in (("num_heads", "medusa_num_heads"), ("num_hidden_layers", "medusa_num_layers")):
            own.setdefault(name, own.get(key))
    return own


def _canonical(name: str, *, is_head_shared: bool) -> str:
    name = _PREFIX.sub("", name, count=1)
    for stored, canonical in _NAMES:
        if stored.fullmatch(name):
            name = stored.sub(canonical, name)
            return HEAD if is_head_shared and name == "heads.0.lm_head.weight" else name
    return name


def _check_num_heads(config: MedusaConfig, weights: SafetensorsStore, where: str) -> None:
    """Published configurations have been known to name another number than the file holds."""
    found = 1 + max(map(_head_number, weights.names()), default=-1)
    if found and found != config.medusa_num_heads:
        raise CheckpointError(
            f"{where}: medusa_num_heads = {config.medusa_num_heads}, but the tensors are those of {found} heads; "
            "correct the key, and give --num-drafts to use fewer of them"
        )


def _head_number(name: str) -> int:
    """-1 for what is no head's."""
    match = re.match(r"heads\.(\d+)\.", name)
    return int(match.group(1)) if match else -1


def _head_matrices(weights: SafetensorsStore) -> list[str]:
    return [name for name in weights.names() if name == HEAD or name.endswith("lm_head.weight")]


def _token_map(spec: MedusaSpec, weights: SafetensorsStore, where: str) -> NDArray[np.int64] | None:
    """Target ids of a reduced vocabulary, in the order of the matrices' rows; None: all."""
    size, vocab_size = spec.draft_vocab_size, spec.decoder.vocab_size
    if size is None:
        return None
    if TOKEN_MAP not in weights.names() or weights.info(TOKEN_MAP).dtype not in ("I64", "I32"):
        raise CheckpointError(
            f"{where}: truncated_vocab_size = {size} of {vocab_size} ids, but there is no tensor {TOKEN_MAP} of whole "
            "numbers, which says which ids they are; download the weights again"
        )
    ids = weights.integers(TOKEN_MAP).astype(np.int64)
    if ids.shape != (size,) or len(np.unique(ids)) != size or ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(
            f"{where}: {TOKEN_MAP}: expected {size} different ids below {vocab_size} (truncated_vocab_size), found "
            f"shape {list(ids.shape)} with ids from {ids.min()} to {ids.max()}; download the weights again"
        )
    return ids


def _rows(weights: SafetensorsStore, name: str, token_map: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of a matrix in ascending order of ids; it has one for each id of the map, or for every id."""
    is_reduced = weights.info(name).shape[0] == len(token_map)
    rows: NDArray[np.int64] = np.argsort(token_map) if is_reduced else np.sort(token_map)
    return rows
