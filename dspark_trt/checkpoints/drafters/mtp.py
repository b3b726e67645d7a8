"""MTP modules inside a target's checkpoint: MiMo's (`MiMoForCausalLM` with num_nextn_predict_layers).

The module reads the target's state behind its final norm and the embedding of the next token, each behind a norm; a
matrix joins them, state first, and one layer of the target's kind follows. Its own final norm gives what the target's
head reads, and what the next step takes for the state. One module was trained, for one draft; with --num-drafts it is
fed its own output again. Source: MiMo's modelling code, and vLLM's and SGLang's MiMo MTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark_trt.checkpoints.checks import check_tensors
from dspark_trt.checkpoints.config import architectures_of
from dspark_trt.checkpoints.families import FAMILIES
from dspark_trt.checkpoints.layout import drafter_shapes
from dspark_trt.checkpoints.safetensors_store import open_safetensors
from dspark_trt.checkpoints.spec import DrafterCheckpoint, Eagle3Spec, TargetCheckpoint, TargetSpec
from dspark_trt.checkpoints.target import read_target_spec
from dspark_trt.errors import CheckpointError

_KEY = "num_nextn_predict_layers"
_PREFIX = "model.mtp_layers.0."
_NOT_ITS = "not of the module: "
_NAMES = {
    "input_proj.weight": "fc.weight",
    "token_layernorm.weight": "token_norm.weight",
    "hidden_layernorm.weight": "hidden_norm.weight",
    "final_layernorm.weight": "norm.weight",
}


def is_mtp(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a target whose checkpoint holds a module that is read here."""
    return architectures_of(dict(values)) == [FAMILIES["mimo"].architecture] and values.get(_KEY) not in (None, 0)


def describe_mtp(folder: Path, values: Mapping[str, Any], target: TargetSpec, num_drafts: int | None) -> Eagle3Spec:
    """Raises CheckpointError as `read_target_spec` does, and for a number of modules that is not 1."""
    if values.get(_KEY) != 1:
        raise CheckpointError(
            f"{folder / 'config.json'}: {_KEY} = {values.get(_KEY)!r}: checkpoints of several MTP modules are not "
            "supported (expected 1)"
        )
    decoder = read_target_spec(str(folder)).decoder
    return Eagle3Spec(
        decoder=replace(decoder, num_layers=1, layer_windows=()),
        gamma=num_drafts or 1,
        target_layer_ids=(target.decoder.num_layers - 1,),
        has_own_embedding=False,
        has_own_head=False,
        num_target_layers=decoder.num_layers,
        is_last_tap_normed=True,
        is_output_normed=True,
        is_module=True,
    )


def read_mtp(
    folder: Path, values: Mapping[str, Any], target: TargetCheckpoint, num_drafts: int | None
) -> DrafterCheckpoint:
    """Raises CheckpointError when it cannot be read, or when configuration and tensors disagree."""
    spec = describe_mtp(folder, values, target.spec, num_drafts)
    stored = open_safetensors(folder, rename=_canonical)
    weights = stored.without(name for name in stored.names() if name.startswith(_NOT_ITS))
    check_tensors(weights, drafter_shapes(spec), str(folder))
    return DrafterCheckpoint(spec, weights)


def _canonical(name: str) -> str:
    if not name.startswith(_PREFIX):
        return _NOT_ITS + name
    own = name.removeprefix(_PREFIX)
    return _NAMES.get(own, f"layers.0.{own}")
