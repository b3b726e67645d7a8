"""Which target ids the rows of a drafter's head stand for: the tensors `d2t` and `t2d` of the speculators form.

`d2t` [W] has, for each draft id, what to add to it; `t2d` [V] is true where a target id has a draft id.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.layout import HEAD
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore
from dspark_trt.checkpoints.spec import DrafterSpec
from dspark_trt.errors import CheckpointError

D2T, T2D = "d2t", "t2d"


def take_draft_ids(
    spec: DrafterSpec, weights: SafetensorsStore, where: str
) -> tuple[NDArray[np.int64] | None, SafetensorsStore]:
    """Target ids of the draft ids, ascending (None: all of the vocabulary), and the store without both tensors.

    Raises CheckpointError where they contradict each other or the configuration, or one that is needed is missing.
    """
    names, size, vocab_size = weights.names(), spec.draft_vocab_size, spec.decoder.vocab_size
    rest = weights.without((D2T, T2D))
    if size is None and D2T not in names and T2D not in names:
        return None, rest
    ids = _target_ids(weights, where) if D2T in names else None
    marked = np.flatnonzero(_vector(weights, T2D, where)) if T2D in names else None
    if marked is not None and len(_vector(weights, T2D, where)) != vocab_size:
        raise CheckpointError(
            f"{where}: {T2D} has {len(_vector(weights, T2D, where))} entries, expected one for each of the "
            f"{vocab_size} target ids; the weights and the configuration do not belong together"
        )
    if ids is not None and marked is not None and not np.array_equal(ids, marked):
        raise CheckpointError(
            f"{where}: {D2T} and {T2D} stand for different ids ({len(ids)} and {len(marked)} of them); {D2T} holds "
            "what to add to a draft id, not target ids, and both are ascending; download the weights again"
        )
    found = ids if ids is not None else marked
    assert found is not None
    if len(found) != (size or vocab_size):
        raise CheckpointError(
            f"{where}: draft_vocab_size = {size or vocab_size}, but {D2T if ids is not None else T2D} has {len(found)} "
            "ids; correct the key or download the weights again"
        )
    if len(found) and (found.min() < 0 or found.max() >= vocab_size or (np.diff(found) <= 0).any()):
        raise CheckpointError(
            f"{where}: {D2T} leads to ids from {found.min()} to {found.max()}, not ascending within the vocabulary of "
            f"{vocab_size}; expected what to add to each draft id"
        )
    return (None if size is None else found), rest


def check_head(spec: DrafterSpec, names: tuple[str, ...], where: str) -> None:
    """Raises CheckpointError where a reduced vocabulary has no map or no head of its own."""
    if spec.draft_vocab_size is None:
        return
    if spec.draft_vocab_size > spec.decoder.vocab_size:
        raise CheckpointError(
            f"{where}: draft_vocab_size = {spec.draft_vocab_size} is more than vocab_size = {spec.decoder.vocab_size}; "
            "padded draft vocabularies are not supported"
        )
    for tensors, what in (((D2T, T2D), "says which ids they are"), ((HEAD,), "has a row for each of them")):
        if not any(name in names for name in tensors):
            raise CheckpointError(
                f"{where}: draft_vocab_size = {spec.draft_vocab_size} of {spec.decoder.vocab_size} ids, but tensor "
                f"{tensors[0]} is missing, which {what}; download the weights again"
            )


def _target_ids(weights: SafetensorsStore, where: str) -> NDArray[np.int64]:
    offsets = _vector(weights, D2T, where).astype(np.int64)
    return offsets + np.arange(len(offsets), dtype=np.int64)


def _vector(weights: SafetensorsStore, name: str, where: str) -> NDArray[np.generic]:
    info = weights.info(name)
    if len(info.shape) != 1 or info.dtype not in ("I64", "I32", "BOOL"):
        raise CheckpointError(
            f"{where}: tensor {name} has shape {list(info.shape)} and element type {info.dtype}, expected a vector of "
            "whole numbers or truth values; download the weights again"
        )
    return weights.integers(name)
