"""Reads a block drafter in any dialect (see `drafters`) and in all its forms.

A feature counts when the configuration and the tensors both say so; where they contradict each other, neither is right.
Source: paper (arXiv 2607.05147) section 3.1; DeepSpec's checkpoints for the canonical key and tensor names.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dspark_trt.checkpoints.config import read_json
from dspark_trt.checkpoints.drafters.description import Description, DrafterConfig
from dspark_trt.checkpoints.drafters.draft_ids import check_head, take_draft_ids
from dspark_trt.checkpoints.drafters.formats import read_description
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD, check_tensors, drafter_shapes, is_equal
from dspark_trt.checkpoints.locate import locate
from dspark_trt.checkpoints.quantised import refuse_quantised
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore, open_safetensors
from dspark_trt.checkpoints.spec import DrafterCheckpoint, DrafterSpec, MarkovHeadType, TargetCheckpoint
from dspark_trt.errors import CheckpointError

_W1 = "markov_head.markov_w1.weight"
_GATE, _JOINT = "markov_head.gate_proj.weight", "markov_head.joint_proj.weight"
_CONFIDENCE, _CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


def read_drafter(source: str, target: TargetCheckpoint, revision: str | None = None) -> DrafterCheckpoint:
    """Read the drafter at `source` (a folder or a hub id).
    Whether it belongs to `target` is for `check_pairing` to say.

    An embedding or head that equals the target's is left out of the weights, so that the target's is used.
    Raises CheckpointError when it cannot be read, is in another format, or when configuration and tensors disagree;
    EnvironmentMissingError when the hub cannot be reached.
    """
    folder = locate(source, revision)
    description, where = _describe(folder), str(folder / "config.json")
    weights = open_safetensors(folder, rename=description.rename).without(description.copies_of_target)
    refuse_quantised({}, weights.names(), str(folder))
    check_head(description.spec, weights.names(), where)
    draft_ids, weights = take_draft_ids(description.spec, weights, where)
    if description.config.tie_word_embeddings:
        _refuse_ambiguous_head(weights, target, where)
    weights = _without_shared(weights, target)
    spec = _spec(description, weights, where)
    check_tensors(weights, drafter_shapes(spec), str(folder))
    return DrafterCheckpoint(spec, weights, draft_ids)


def read_drafter_spec(source: str, revision: str | None = None) -> DrafterSpec:
    """What the drafter's configuration alone says; of a hub id no weight is fetched for it.

    What only tensors tell is taken as the configuration says: whether there is an embedding or a head of its own, and
    whether the confidence head has a bias. Raises CheckpointError, EnvironmentMissingError as `read_drafter` does.
    """
    return _describe(locate(source, revision, with_weights=False)).spec


def _describe(folder: Path) -> Description:
    if folder.is_file():
        raise CheckpointError(f"{folder}: drafters are read from Hugging Face folders and hub ids, found a GGUF file")
    where = str(folder / "config.json")
    values = read_json(folder / "config.json")
    refuse_quantised(values, (), where)
    return read_description(values, where)


def _spec(description: Description, weights: SafetensorsStore, where: str) -> DrafterSpec:
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


def _refuse_ambiguous_head(weights: SafetensorsStore, target: TargetCheckpoint, where: str) -> None:
    """Tied, with an embedding and no head: the head would be the drafter's embedding, or the target's head.

    DeepSpec writes tie_word_embeddings false; a copied configuration may still say true. Harmless unless the two
    differ.
    """
    if EMBEDDING not in weights.names() or HEAD in weights.names():
        return
    target_head = target.weights.array(EMBEDDING if target.spec.is_head_tied else HEAD)
    if not is_equal(weights.array(EMBEDDING), target_head):
        raise CheckpointError(
            f"{where}: tie_word_embeddings is true and the file has {EMBEDDING}, but no {HEAD}: the head could be this "
            "embedding or the target's head, which differ. Set tie_word_embeddings to false to use the target's, or "
            f"store {HEAD}"
        )


def _without_shared(weights: SafetensorsStore, target: TargetCheckpoint) -> SafetensorsStore:
    target_names = {EMBEDDING: EMBEDDING, HEAD: EMBEDDING if target.spec.is_head_tied else HEAD}
    return weights.without(
        name
        for name, target_name in target_names.items()
        if name in weights.names() and is_equal(weights.array(name), target.weights.array(target_name))
    )
