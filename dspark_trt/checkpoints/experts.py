"""Mixtures of experts: what the configuration says, and one stack of weights from either layout of a checkpoint.

Published checkpoints have three matrices for each expert (Mixtral calls them w1, w3 and w2, and the layer's block
`block_sparse_moe`). transformers 5 holds two stacks, `gate_up_proj` [E, 2I, D] with all rows of gate before those of
up, and `down_proj` [E, D, I], and can save them so. GGUF files have three stacks. The canonical stack has the rows of
gate and up in turn, as ONNX Runtime's operator wants them.

Source: configuration and modelling code of Qwen2-MoE, Qwen3-MoE and Mixtral in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from dspark_trt.checkpoints.config import parse
from dspark_trt.checkpoints.derived import Derived, DerivedStore
from dspark_trt.checkpoints.layout import EXPERTS_DOWN, EXPERTS_UP
from dspark_trt.checkpoints.spec import ExpertsSpec, Family, TensorInfo, WeightStore
from dspark_trt.errors import CheckpointError

MAX_EXPERTS = 4096  # of a layer, beyond any model
COUNT_KEYS = ("num_experts", "num_local_experts")  # two names for the same: transformers reads both
_BLOCK = "mlp"
_MIXTRAL_BLOCK = "block_sparse_moe"
_MIXTRAL_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
_HINT = "take it from the configuration of the published model"


class ExpertsConfig(BaseModel):
    """The keys that only models with experts have. Without `moe_intermediate_size`, experts are as wide as an MLP."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    num_experts: NonNegativeInt | None = Field(default=None, le=MAX_EXPERTS)
    num_local_experts: NonNegativeInt | None = Field(default=None, le=MAX_EXPERTS)
    num_experts_per_tok: PositiveInt
    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt | None = None
    shared_expert_intermediate_size: PositiveInt | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[int] = Field(default=[], max_length=1 << 16)


def experts_spec(values: Mapping[str, Any], family: Family, num_layers: int, where: str) -> ExpertsSpec | None:
    """None where no layer has experts. Raises CheckpointError for missing, wrong and contradicting keys."""
    config = parse(ExpertsConfig, dict(values), where, dict.fromkeys(ExpertsConfig.model_fields, _HINT))
    counts = {count for count in (config.num_experts, config.num_local_experts) if count is not None}
    if len(counts) != 1:
        found = " and ".join(f"{key} = {values.get(key)}" for key in COUNT_KEYS)
        raise CheckpointError(f"{where}: {found}: expected one number of experts; {_HINT}")
    (count,) = counts
    is_mixtral = family == "mixtral"
    step, without = (1, set()) if is_mixtral else (config.decoder_sparse_step, set(config.mlp_only_layers))
    layers = tuple(index for index in range(num_layers) if (index + 1) % step == 0 and index not in without)
    if not count or not layers:
        return None
    if config.num_experts_per_tok > count:
        raise CheckpointError(
            f"{where}: num_experts_per_tok = {config.num_experts_per_tok} is more than the {count} experts; {_HINT}"
        )
    inner = config.intermediate_size if is_mixtral else config.moe_intermediate_size
    shared = config.shared_expert_intermediate_size if family == "qwen2_moe" else None
    for key, value in (("moe_intermediate_size", inner), ("shared_expert_intermediate_size", shared)):
        if value is None and (key == "moe_intermediate_size" or family == "qwen2_moe"):
            raise CheckpointError(f"{where}: {key} is missing; {_HINT}")
    assert inner is not None
    is_normalised = is_mixtral or config.norm_topk_prob
    return ExpertsSpec(layers, count, config.num_experts_per_tok, inner, is_normalised, shared)


def with_expert_stacks(weights: WeightStore, experts: ExpertsSpec, hidden_size: int, where: str) -> WeightStore:
    """The same weights with canonical stacks, whichever layout each layer is stored in.

    Raises CheckpointError for an expert that is missing, of another shape or of another element type than the first.
    """
    names, derived = frozenset(weights.names()), {}
    for layer in experts.layers:
        at = f"layers.{layer}."
        fused_up, fused_down = f"{at}{_BLOCK}.experts.gate_up_proj", f"{at}{_BLOCK}.experts.down_proj"
        if router := {f"{at}{_MIXTRAL_BLOCK}.gate.weight"} & names:
            (name,) = router
            derived[f"{at}{_BLOCK}.gate.weight"] = Derived(weights.info(name), (name,), partial(weights.array, name))
        if fused_up in names:
            info = _checked(
                weights, (fused_up,), (experts.num_experts, 2 * experts.intermediate_size, hidden_size), where
            )
            derived[at + EXPERTS_UP] = Derived(info, (fused_up,), partial(_in_turn, weights, fused_up))
            if fused_down in names:
                info = weights.info(fused_down)
                derived[at + EXPERTS_DOWN] = Derived(info, (fused_down,), partial(weights.array, fused_down))
            continue
        gate_stack, up_stack = f"{at}{_BLOCK}.experts.gate.weight", f"{at}{_BLOCK}.experts.up.weight"
        if gate_stack in names:  # of GGUF, whose third is the canonical one
            shape = (experts.num_experts, experts.intermediate_size, hidden_size)
            info = _checked(weights, (gate_stack, up_stack), shape, where)
            stack = TensorInfo(info.dtype, (shape[0], 2 * shape[1], shape[2]))
            make = partial(_of_stacks, weights, gate_stack, up_stack)
            derived[at + EXPERTS_UP] = Derived(stack, (gate_stack, up_stack), make)
            continue
        gates, ups, downs = (_of_experts(names, at, which, experts.num_experts) for which in ("gate", "up", "down"))
        info = _checked(weights, gates + ups, (experts.intermediate_size, hidden_size), where)
        stack = TensorInfo(info.dtype, (experts.num_experts, 2 * experts.intermediate_size, hidden_size))
        derived[at + EXPERTS_UP] = Derived(stack, gates + ups, partial(_stacked_pairs, weights, gates, ups))
        info = _checked(weights, downs, (hidden_size, experts.intermediate_size), where)
        stack = TensorInfo(info.dtype, (experts.num_experts, hidden_size, experts.intermediate_size))
        derived[at + EXPERTS_DOWN] = Derived(stack, downs, partial(_stacked, weights, downs))
    return DerivedStore(weights, derived)


def _of_experts(names: frozenset[str], at: str, which: str, count: int) -> tuple[str, ...]:
    if f"{at}{_MIXTRAL_BLOCK}.experts.0.{_MIXTRAL_NAMES[which]}.weight" in names:
        return tuple(f"{at}{_MIXTRAL_BLOCK}.experts.{e}.{_MIXTRAL_NAMES[which]}.weight" for e in range(count))
    return tuple(f"{at}{_BLOCK}.experts.{e}.{which}_proj.weight" for e in range(count))


def _checked(weights: WeightStore, names: tuple[str, ...], shape: tuple[int, ...], where: str) -> TensorInfo:
    """What all of them are."""
    known = frozenset(weights.names())
    for name in names:
        if name not in known:
            raise CheckpointError(
                f"{where}: tensor {name} is missing (expected shape {list(shape)}); download the checkpoint again or "
                "correct its config.json"
            )
        found, first = weights.info(name), weights.info(names[0])
        if found.shape != shape or found.dtype != first.dtype:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(found.shape)} and type {found.dtype}, expected {list(shape)} "
                f"and {first.dtype}, as the other experts; the weights and the configuration do not belong together"
            )
    return weights.info(names[0])


def _stacked_pairs(weights: WeightStore, gates: tuple[str, ...], ups: tuple[str, ...]) -> NDArray[np.generic]:
    """[E, 2I, D]."""
    return _alternating([weights.array(name) for name in gates], [weights.array(name) for name in ups])


def _in_turn(weights: WeightStore, name: str) -> NDArray[np.generic]:
    """[E, 2I, D] of all gates before all ups -> gate and up in turn."""
    stack = weights.array(name)
    inner = stack.shape[1] // 2
    return _alternating(list(stack[:, :inner]), list(stack[:, inner:]))


def _of_stacks(weights: WeightStore, gates: str, ups: str) -> NDArray[np.generic]:
    return _alternating(list(weights.array(gates)), list(weights.array(ups)))


def _alternating(gates: list[NDArray[np.generic]], ups: list[NDArray[np.generic]]) -> NDArray[np.generic]:
    inner, hidden = gates[0].shape
    stack = np.empty((len(gates), 2 * inner, hidden), gates[0].dtype)
    for expert, (gate, up) in enumerate(zip(gates, ups, strict=True)):
        stack[expert, 0::2], stack[expert, 1::2] = gate, up
    return stack


def _stacked(weights: WeightStore, names: tuple[str, ...]) -> NDArray[np.generic]:
    return np.stack([weights.array(name) for name in names])
