"""Tiny random EAGLE-3 drafters in the form that each trainer writes, from the facts of its code.

They begin as DeepSpec's DSpark form (`factories.write_drafter`), whose decoder layer they share but for projections.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.support.drafter_dialects import Config, Tensors, Written, keep_ids, laid_over, write_files
from tests.support.factories import write_drafter

_BLOCK_KEYS = ("block_size", "mask_token_id", "num_anchors", "markov_rank", "enable_confidence_head")


def write_eagle3(
    folder: Path,
    target: Path,
    dialect: str,
    *,
    layer_ids: tuple[int, ...] | None = (0, 1, 3),
    num_taps: int = 3,
    draft_ids: NDArray[np.int64] | None = None,
    tap_norm: str = "none",
    extra: Config | None = None,
    seed: int = 1,
    **more: Any,
) -> Path:
    """`layer_ids` as this dialect counts them; None: the configuration names none, and there are `num_taps`.

    draft_ids: the head has rows for these alone (not in DeepSpec's form). tap_norm: none, each or joint. `extra` keys
    are laid over config.json (None removes one). `more`: options of `write_drafter`.
    """
    count = num_taps if layer_ids is None else len(layer_ids)
    plain = {"layers": 1, "markov_rank": 0, "confidence": False, "embed_head": "different"}
    write_drafter(folder, target, taps=range(count), seed=seed, **{**plain, **more})
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in _BLOCK_KEYS}
    tensors = _layer_tensors(load_file(folder / "model.safetensors"), count, tap_norm, np.random.default_rng(seed + 1))
    config["target_layer_ids"] = None if layer_ids is None else list(layer_ids)
    writer = {"deepspec": _deepspec, "community": _community, "speculators": _speculators, "dart": _dart}[dialect]
    config, tensors = writer(config, tensors)
    if tap_norm != "none":
        config["fc_norm" if tap_norm == "each" else "norm_before_fc"] = True
    if draft_ids is not None:
        keep_ids(config, tensors, draft_ids, vocab_size=len(tensors["embed_tokens.weight"]))
    write_files(folder, laid_over(config, extra or {}), tensors)
    return folder


def _layer_tensors(tensors: Tensors, num_taps: int, tap_norm: str, random: np.random.Generator) -> Tensors:
    """Projections read embedding and feature side by side, each behind a norm of its own."""
    hidden = len(tensors["norm.weight"])
    for name in ("q", "k", "v"):
        key = f"layers.0.self_attn.{name}_proj.weight"
        second = random.standard_normal(tensors[key].shape).astype(np.float32) / hidden**0.5
        tensors[key] = np.concatenate([tensors[key], second], axis=1)
    tensors["layers.0.hidden_norm.weight"] = tensors.pop("hidden_norm.weight")
    if tap_norm == "joint":
        tensors["input_norm.weight"] = 1 + 0.1 * random.standard_normal(num_taps * hidden).astype(np.float32)
    if tap_norm == "each":
        for tap in range(num_taps):
            tensors[f"fc_norm.{tap}.weight"] = 1 + 0.1 * random.standard_normal(hidden).astype(np.float32)
    return tensors


def _deepspec(config: Config, tensors: Tensors) -> Written:
    own = {
        "architectures": ["Qwen3Eagle3Model"],
        "ttt_length": 7,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
        "target_model_name_or_path": "Qwen/Qwen3-4B",
    }
    return {**config, **own}, tensors


def _community(config: Config, tensors: Tensors) -> Written:
    """A Llama layer called `midlayer`; all of the vocabulary, until ids are kept."""
    ids = config.pop("target_layer_ids")
    config = {key: value for key, value in config.items() if key not in ("num_target_layers", "layer_types")}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": None}
    if ids is not None:
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    return config, {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in tensors.items()
        if not name.endswith(("q_norm.weight", "k_norm.weight"))
    }


def _dart(config: Config, tensors: Tensors) -> Written:
    """A community drafter with a vector for masks. The buffers of a whole vocabulary are left at zero."""
    config, tensors = _community(config, tensors)
    hidden, vocab_size = len(tensors["norm.weight"]), config["vocab_size"]
    tensors["midlayer.mask_rep"] = np.random.default_rng(9).standard_normal(2 * hidden).astype(np.float32)
    tensors |= {"d2t": np.zeros(vocab_size, np.int64), "t2d": np.zeros(vocab_size, np.bool_)}
    config |= {"architectures": ["LlamaForCausalLMDart"], "draft_length": 4, "draft_vocab_size": vocab_size}
    return {key: each for key, each in config.items() if key != "eagle_config"}, tensors


def _speculators(config: Config, tensors: Tensors) -> Written:
    ids = config.pop("target_layer_ids")
    own = ("architectures", "num_target_layers")
    top = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": {key: value for key, value in config.items() if key not in own},
        "eagle_aux_hidden_state_layer_ids": ids,
        "draft_vocab_size": config["vocab_size"],
        "norm_before_residual": True,
        "target_hidden_size": None,
    }
    return top, tensors
