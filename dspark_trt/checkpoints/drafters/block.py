"""Reads a block drafter in any dialect and in all its forms.

A feature counts when the configuration and the tensors both say so; where they contradict each other, neither is right.
Source: paper (arXiv 2607.05147) section 3.1; DeepSpec's checkpoints for the canonical key and tensor names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark_trt.checkpoints.checks import check_tensors
from dspark_trt.checkpoints.drafters.description import Description, DrafterConfig
from dspark_trt.checkpoints.drafters.draft_ids import check_head, take_draft_ids
from dspark_trt.checkpoints.drafters.shared import refuse_ambiguous_head, without_shared
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD, SINK, drafter_shapes
from dspark_trt.checkpoints.quantised import refuse_quantised
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore, open_safetensors
from dspark_trt.checkpoints.spec import (
    BlockDrafterSpec,
    DrafterCheckpoint,
    MarkovHeadType,
    TargetCheckpoint,
    a_drafter,
)
from dspark_trt.errors import CheckpointError

BlockReader = Callable[[dict[str, Any], str], Description]  # of one dialect: config.json's values, and where it stands
_W1 = "markov_head.markov_w1.weight"
_GATE, _JOINT = "markov_head.gate_proj.weight", "markov_head.joint_proj.weight"
_MASK_EMBEDDING = "mask_embedding.pt"
_CONFIDENCE, _CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


def block_spec(drafter: DrafterCheckpoint, what: str) -> BlockDrafterSpec:
    """Raises CheckpointError where the drafter is of another family, which `what` is not for."""
    if not isinstance(drafter.spec, BlockDrafterSpec):
        raise CheckpointError(f"{what} is for block drafters (DSpark, DFlash), found {a_drafter(drafter.spec.kind)}")
    return drafter.spec


def read_block_drafter(
    folder: Path, values: dict[str, Any], reader: BlockReader, target: TargetCheckpoint
) -> DrafterCheckpoint:
    """The block drafter in `folder`, whose config.json has `values`; `reader` is its dialect's.

    An embedding or head that equals the target's is left out of the weights, so that the target's is used.
    Raises CheckpointError when it cannot be read, or when configuration and tensors disagree.
    """
    where = str(folder / "config.json")
    description = reader(values, where)
    if (folder / _MASK_EMBEDDING).exists():
        raise CheckpointError(
            f"{folder}: {_MASK_EMBEDDING}: the drafter has an embedding of its own for the mask token (Xiaomi's MiMo "
            "DFlash), which is not supported; use a drafter whose masks are rows of the embedding"
        )
    weights = open_safetensors(folder, rename=description.rename).without(description.copies_of_target)
    _check_sinks(description, weights, where)
    refuse_quantised({}, weights.names(), str(folder))
    check_head(description.spec, weights.names(), where)
    draft_ids, weights = take_draft_ids(description.spec, weights, where)
    if description.config.tie_word_embeddings:
        refuse_ambiguous_head(weights, target, where)
    weights = without_shared(weights, target)
    spec = _spec(description, weights, where)
    check_tensors(weights, drafter_shapes(spec), str(folder))
    return DrafterCheckpoint(spec, weights, draft_ids)


def _check_sinks(description: Description, weights: SafetensorsStore, where: str) -> None:
    """Raises CheckpointError where a layer has a sink and no key tells of it, or the other way round."""
    spec, names = description.spec, weights.names()
    for layer in range(spec.decoder.num_layers):
        tensor, is_stated = SINK.format(layer), spec.attention_of(layer).has_sink
        if is_stated != (tensor in names):
            raise CheckpointError(
                f"{where}: attention_sink_bias is {str(is_stated).lower()}, but tensor {tensor} is "
                f"{'missing' if is_stated else 'there'}; correct the key or download the weights again"
            )


def _spec(description: Description, weights: SafetensorsStore, where: str) -> BlockDrafterSpec:
    """The description with what tensors tell. Raises CheckpointError where they contradict the configuration."""
    names, config = weights.names(), description.config
    rank = _markov_rank(config, weights, where)
    has_confidence = _CONFIDENCE in names
    if not (description.is_confidence_told_by_tensors and config.enable_confidence_head is None):
        is_stated = bool(config.enable_confidence_head)
        _agrees(is_stated, has_confidence, "enable_confidence_head", _CONFIDENCE, where)
    head_type = _markov_head_type(config, names, where) if rank else "vanilla"
    if head_type == "rnn" and description.spec.is_mask_first:
        raise CheckpointError(
            f"{where}: markov_head_type is 'rnn' in a drafter that is mask first: its recurrence was trained from the "
            "anchor's position on, which is not implemented; use a vanilla or gated head, or an anchor-first drafter"
        )
    return replace(
        description.spec,
        markov_rank=rank,
        markov_head_type=head_type,
        has_confidence_head=has_confidence,
        has_confidence_bias=has_confidence and _CONFIDENCE_BIAS in names,
        is_confidence_with_markov=has_confidence and _is_with_markov(config, rank, weights, where),
        has_own_embedding=EMBEDDING in names,
        has_own_head=HEAD in names,
    )


def _markov_rank(config: DrafterConfig, weights: SafetensorsStore, where: str) -> int:
    rank = config.markov_rank or 0
    _agrees(rank > 0, _W1 in weights.names(), f"markov_rank ({config.markov_rank})", _W1, where)
    return rank


def _markov_head_type(config: DrafterConfig, names: tuple[str, ...], where: str) -> MarkovHeadType:
    found: MarkovHeadType = "gated" if _GATE in names else "rnn" if _JOINT in names else "vanilla"
    if config.markov_head_type not in (None, found):
        raise CheckpointError(
            f"{where}: markov_head_type is {config.markov_head_type!r}, but the tensors are those of a {found!r} head "
            f"({_GATE} for gated, {_JOINT} for rnn, neither for vanilla); correct the key or download the weights again"
        )
    return found


def _is_with_markov(config: DrafterConfig, rank: int, weights: SafetensorsStore, where: str) -> bool:
    """Absent, the key follows from the width of the projection: D, or D + r."""
    stated = config.confidence_head_with_markov
    if stated and not rank:
        raise CheckpointError(
            f"{where}: confidence_head_with_markov is true, but markov_rank is {config.markov_rank}: there is no "
            "Markov embedding to read; correct one of them"
        )
    return (
        weights.info(_CONFIDENCE).shape[-1] == config.hidden_size + rank > config.hidden_size
        if stated is None
        else stated
    )


def _agrees(is_configured: bool, is_present: bool, key: str, tensor: str, where: str) -> bool:
    if is_configured != is_present:
        raise CheckpointError(
            f"{where}: {key} says that there is {'a' if is_configured else 'no'} head, but {tensor} is "
            f"{'there' if is_present else 'missing'}; correct the key or download the weights again"
        )
    return is_configured
