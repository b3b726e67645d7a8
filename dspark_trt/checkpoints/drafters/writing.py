"""Writes a drafter down in another trainer's form, where that form can hold it.

What a form has no key for is refused: a loader of that form would draft something else without an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import save_file

from dspark_trt.checkpoints.drafters.writing_block import block_to_deepspec, block_to_speculators
from dspark_trt.checkpoints.drafters.writing_eagle3 import eagle3_to_deepspec, eagle3_to_speculators
from dspark_trt.checkpoints.drafters.writing_medusa import medusa_to_own, medusa_to_vllm
from dspark_trt.checkpoints.drafters.written import Written
from dspark_trt.checkpoints.spec import (
    BlockDrafterSpec,
    DrafterCheckpoint,
    Eagle3Spec,
    MedusaSpec,
    TargetCheckpoint,
    a_drafter,
)
from dspark_trt.errors import CheckpointError

Form = Literal["deepspec", "speculators", "medusa", "vllm"]
_FILES = {"medusa": "medusa_lm_head.safetensors"}  # of the others: model.safetensors


def write_drafter(
    drafter: DrafterCheckpoint, target: TargetCheckpoint, folder: Path, form: Form, verifier: str
) -> None:
    """Write config.json and the tensors into `folder`, which is there.

    Args:
        verifier: how the target is called, for the forms that name it.

    Raises CheckpointError where the form cannot hold the drafter, with the key that decides.
    """
    forms = _forms(drafter, target, verifier)
    if form not in forms:
        raise CheckpointError(
            f"{form}: that form has no place for {a_drafter(drafter.spec.kind)}; "
            + (f"use --to {' or --to '.join(forms)}" if forms else "its checkpoint is a model of its own, which loads")
        )
    _check_last_tap(drafter, target, form)
    config, tensors = forms[form]()
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    path = folder / _FILES.get(form, "model.safetensors")
    save_file({name: np.ascontiguousarray(each) for name, each in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes for the owner alone


def _forms(drafter: DrafterCheckpoint, target: TargetCheckpoint, verifier: str) -> dict[str, Callable[[], Written]]:
    """The forms of the drafter's family."""
    match drafter.spec:
        case BlockDrafterSpec() as block:
            return {
                "deepspec": lambda: block_to_deepspec(block, drafter, target),
                "speculators": lambda: block_to_speculators(block, drafter, target, verifier),
            }
        case Eagle3Spec() as eagle3:
            return {
                "deepspec": lambda: eagle3_to_deepspec(eagle3, drafter, target),
                "speculators": lambda: eagle3_to_speculators(eagle3, drafter, target, verifier),
            }
        case MedusaSpec() as medusa:
            return {
                "medusa": lambda: medusa_to_own(medusa, drafter, target, verifier),
                "vllm": lambda: medusa_to_vllm(medusa, drafter, target),
            }
        case _:
            return {}


def _check_last_tap(drafter: DrafterCheckpoint, target: TargetCheckpoint, form: Form) -> None:
    """Both forms of Medusa mean what the heads were trained on; of the others only one does."""
    last_layer, is_normed = target.spec.decoder.num_layers - 1, form != "speculators"
    spec = drafter.spec
    if last_layer in spec.target_layer_ids and spec.is_last_tap_normed != is_normed:
        raise CheckpointError(
            f"target_layer_ids: the drafter taps the target's last layer ({last_layer}) "
            f"{'before' if is_normed else 'behind'} its final norm, and {form} means "
            f"{'behind' if is_normed else 'before'} it; this drafter cannot be written in that form"
        )
