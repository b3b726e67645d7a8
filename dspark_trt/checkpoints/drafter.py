"""Reads a DSpark drafter in DeepSpec's format, in all its forms.

A feature counts when the configuration and the tensors both say so; where they contradict each other, neither is right.
Source: paper (arXiv 2607.05147) section 3.1; DeepSpec's checkpoints for the key and tensor names.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt

from dspark_trt.checkpoints.config import DecoderConfig, decoder_spec, parse, read_json, refuse_unsupported
from dspark_trt.checkpoints.drafter_format import refuse_other_formats
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD, check_tensors, drafter_shapes, is_equal
from dspark_trt.checkpoints.locate import locate
from dspark_trt.checkpoints.quantised import refuse_quantised
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore, open_safetensors
from dspark_trt.checkpoints.spec import DrafterCheckpoint, DrafterSpec, MarkovHeadType, TargetCheckpoint
from dspark_trt.errors import CheckpointError

_W1 = "markov_head.markov_w1.weight"
_GATE, _JOINT = "markov_head.gate_proj.weight", "markov_head.joint_proj.weight"
_CONFIDENCE, _CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
_MAX_BLOCK = 1024  # beyond any drafter
_HINTS = {
    "target_layer_ids": "it says which target layers the drafter was trained on, and no default is right for another "
    "drafter: take the value from the training configuration",
    "block_size": "it is the number of drafts per block that the drafter was trained with",
    "mask_token_id": "it is the token that fills the block after the anchor; take it from the training configuration",
}


class DrafterConfig(DecoderConfig):
    """config.json of a drafter: the decoder's keys and DeepSpec's."""

    block_size: int = Field(ge=1, le=_MAX_BLOCK)
    mask_token_id: NonNegativeInt
    target_layer_ids: list[int] = Field(min_length=1)
    num_target_layers: PositiveInt | None = None
    markov_rank: NonNegativeInt | None = None
    markov_head_type: MarkovHeadType | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None


def read_drafter(source: str, target: TargetCheckpoint, revision: str | None = None) -> DrafterCheckpoint:
    """Read the drafter at `source` (a folder or a hub id).
    Whether it belongs to `target` is for `check_pairing` to say.

    An embedding or head that equals the target's is left out of the weights, so that the target's is used.
    Raises CheckpointError when it cannot be read, is in another format, or when configuration and tensors disagree;
    EnvironmentMissingError when the hub cannot be reached.
    """
    folder = locate(source, revision)
    config, where = _read_config(folder), str(folder / "config.json")
    weights = open_safetensors(folder, rename=str)
    refuse_quantised({}, weights.names(), str(folder))
    if config.tie_word_embeddings:
        _refuse_ambiguous_head(weights, target, where)
    weights = _without_shared(weights, target)
    spec = _spec(config, weights, where)
    check_tensors(weights, drafter_shapes(spec), str(folder))
    return DrafterCheckpoint(spec, weights)


def read_drafter_spec(source: str, revision: str | None = None) -> DrafterSpec:
    """What the drafter's configuration alone says; of a hub id no weight is fetched for it.

    What only tensors tell is taken as the configuration says: whether there is an embedding or a head of its own, and
    whether the confidence head has a bias. Raises CheckpointError, EnvironmentMissingError as `read_drafter` does.
    """
    folder = locate(source, revision, with_weights=False)
    config, where = _read_config(folder), str(folder / "config.json")
    rank = config.markov_rank or 0
    return DrafterSpec(
        decoder=decoder_spec(config, "qwen3", where),
        gamma=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=_taps(config, where),
        markov_rank=rank,
        markov_head_type=config.markov_head_type or "vanilla",
        has_confidence_head=bool(config.enable_confidence_head),
        has_confidence_bias=False,
        is_confidence_with_markov=bool(config.confidence_head_with_markov),
        has_own_embedding=False,
        has_own_head=False,
        num_target_layers=config.num_target_layers,
    )


def _read_config(folder: Path) -> DrafterConfig:
    if folder.is_file():
        raise CheckpointError(f"{folder}: drafters are read from Hugging Face folders and hub ids, found a GGUF file")
    where = str(folder / "config.json")
    values = read_json(folder / "config.json")
    refuse_other_formats(values, where)
    refuse_quantised(values, (), where)
    refuse_unsupported(values, where, is_causal=False)
    return parse(DrafterConfig, values, where, _HINTS)


def _taps(config: DrafterConfig, where: str) -> tuple[int, ...]:
    taps = tuple(config.target_layer_ids)
    if list(taps) != sorted(set(taps)):
        raise CheckpointError(
            f"{where}: target_layer_ids {list(taps)} are not strictly increasing; the columns of fc follow their "
            "order, so they must be written as trained"
        )
    return taps


def _spec(config: DrafterConfig, weights: SafetensorsStore, where: str) -> DrafterSpec:
    names = weights.names()
    taps = _taps(config, where)
    rank = _markov_rank(config, weights, where)
    has_confidence = _agrees(
        bool(config.enable_confidence_head), _CONFIDENCE in names, "enable_confidence_head", _CONFIDENCE, where
    )
    return DrafterSpec(
        decoder=decoder_spec(config, "qwen3", where),
        gamma=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=taps,
        markov_rank=rank,
        markov_head_type=_markov_head_type(config, names, where) if rank else "vanilla",
        has_confidence_head=has_confidence,
        has_confidence_bias=has_confidence and _CONFIDENCE_BIAS in names,
        is_confidence_with_markov=has_confidence and _is_with_markov(config, rank, weights, where),
        has_own_embedding=EMBEDDING in names,
        has_own_head=HEAD in names,
        num_target_layers=config.num_target_layers,
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
