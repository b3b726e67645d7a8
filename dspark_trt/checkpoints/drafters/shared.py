"""Embedding and head, which a drafter has of its own or shares with its target."""

from __future__ import annotations

from dspark_trt.checkpoints.checks import is_equal
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore
from dspark_trt.checkpoints.spec import TargetCheckpoint
from dspark_trt.errors import CheckpointError


def refuse_ambiguous_head(weights: SafetensorsStore, target: TargetCheckpoint, where: str) -> None:
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


def without_shared(weights: SafetensorsStore, target: TargetCheckpoint) -> SafetensorsStore:
    """Without an embedding or a head that equals the target's, so that the target's is used."""
    target_names = {EMBEDDING: EMBEDDING, HEAD: EMBEDDING if target.spec.is_head_tied else HEAD}
    return weights.without(
        name
        for name, target_name in target_names.items()
        if name in weights.names() and is_equal(weights.array(name), target.weights.array(target_name))
    )
