"""Reads a drafter of any family and dialect: its config.json says which, and a module of `drafters` reads it.

A feature counts when the configuration and the tensors both say so; where they contradict each other, neither is right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark_trt.checkpoints.config import read_json
from dspark_trt.checkpoints.drafters.block import read_block_drafter
from dspark_trt.checkpoints.drafters.eagle3 import describe_eagle3, is_eagle3, read_eagle3_drafter
from dspark_trt.checkpoints.drafters.formats import block_reader, read_description
from dspark_trt.checkpoints.drafters.language_model import (
    describe_language_model,
    is_language_model,
    read_language_model,
)
from dspark_trt.checkpoints.drafters.medusa import describe_medusa, is_medusa, read_medusa
from dspark_trt.checkpoints.drafters.mtp import describe_mtp, is_mtp, read_mtp
from dspark_trt.checkpoints.locate import locate
from dspark_trt.checkpoints.quantised import refuse_quantised
from dspark_trt.checkpoints.spec import DrafterCheckpoint, DrafterSpec, TargetCheckpoint, TargetSpec


def read_drafter(
    source: str, target: TargetCheckpoint, revision: str | None = None, *, num_drafts: int | None = None
) -> DrafterCheckpoint:
    """Read the drafter at `source`: a folder or a hub id, or a GGUF file, which is a language model.

    Whether it belongs to `target` is for `check_pairing` to say.

    An embedding or head that equals the target's is left out of the weights, so that the target's is used.

    Args:
        num_drafts: gamma, for families that draft one token after the other; None: what the checkpoint says, or
            7. A block drafter drafts what its block has, whatever this is.

    Raises CheckpointError when it cannot be read, is in another format, or when configuration and tensors disagree;
    EnvironmentMissingError when the hub cannot be reached.
    """
    folder = locate(source, revision)
    if folder.is_file():
        return read_language_model(folder, {}, target, num_drafts)
    values, where = _read_config(folder)
    if is_mtp(values):
        return read_mtp(folder, values, target, num_drafts)
    if is_language_model(values):
        return read_language_model(folder, values, target, num_drafts)
    if is_medusa(values):
        return read_medusa(folder, values, target, num_drafts)
    if is_eagle3(values):
        return read_eagle3_drafter(folder, values, target, num_drafts)
    return read_block_drafter(folder, values, block_reader(values, where), target)


def read_drafter_spec(
    source: str, target: TargetSpec, revision: str | None = None, *, num_drafts: int | None = None
) -> DrafterSpec:
    """What the drafter's configuration alone says; of a hub id no weight is fetched for it.

    What only tensors tell is taken as the configuration says: whether there is an embedding or a head of its own, and
    whether the confidence head has a bias. Raises CheckpointError, EnvironmentMissingError as `read_drafter` does.
    """
    folder = locate(source, revision, with_weights=False)
    if folder.is_file():
        return describe_language_model(folder, {}, target, num_drafts)
    values, where = _read_config(folder)
    if is_mtp(values):
        return describe_mtp(folder, values, target, num_drafts)
    if is_language_model(values):
        return describe_language_model(folder, values, target, num_drafts)
    if is_medusa(values):
        return describe_medusa(values, where, target, num_drafts)
    if is_eagle3(values):
        return describe_eagle3(values, where, target, num_drafts).spec
    return read_description(values, where).spec


def _read_config(folder: Path) -> tuple[dict[str, Any], str]:
    where = str(folder / "config.json")
    values = read_json(folder / "config.json")
    refuse_quantised(values, (), where)
    return values, where
