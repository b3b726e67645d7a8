"""Tiny random drafters in the form that each trainer writes, from the facts of its code.

They begin as DeepSpec's form (`factories.write_drafter`), whose names and shapes all trainers share.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.support.factories import write_drafter

DRAFT_IDS = np.array([0, 2, 3, 5, 8, 13, 21, 34, 55, 89, 90, 91, 95, 96], np.int64)
_HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_BLOCK_KEYS = ("block_size", "mask_token_id", "target_layer_ids")
_OWN = (*_HEAD_KEYS, *_BLOCK_KEYS, "num_target_layers", "num_anchors", "architectures")
Config = dict[str, Any]
Tensors = dict[str, NDArray[Any]]
Written = tuple[Config, Tensors]
_SHARED = ("embed_tokens.weight", "lm_head.weight")
_W2 = "markov_head.markov_w2.weight"


def write_dialect(
    folder: Path, target: Path, dialect: str, *, block_size: int = 5, layer_ids: tuple[int, ...] = (0, 2), **more: Any
) -> Path:
    """`layer_ids` as this dialect counts them. `more`: `extra` keys laid over config.json (None removes one; a nested
    object is laid over the nested one), `sliding` layers and their window, `draft_ids` that the head has rows for
    (speculators), `sinks`: every layer has one, and options of `write_drafter`."""
    extra, sliding = more.pop("extra", {}), more.pop("sliding", None)
    sinks = more.pop("sinks", dialect == "nemotron")
    draft_ids = more.pop("draft_ids", None)
    is_plain_flash = dialect in ("z-lab", "nemo-dflash", "speculators-dflash", "deepspec-dflash")
    if is_plain_flash:
        more = {"markov_rank": 0, "confidence": False, **more}
    if draft_ids is not None:
        more = {"embed_head": "different", **more}
    write_drafter(folder, target, gamma=block_size, taps=layer_ids, **more)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if sliding:
        config |= {"layer_types": list(sliding[0]), "sliding_window": sliding[1], "use_sliding_window": True}
    if sinks:
        _add_sinks(tensors)
    writer = {
        "deepspec": _same,
        "nemotron": _nemotron,
        "deepspec-dflash": _same,
        "nemo-dspark": _nemo_dspark,
        "z-lab": _zlab,
        "specforge": _specforge,
        "specforge-nested": _specforge_nested,
        "nemo-dflash": _nemo_dflash,
        "speculators": _speculators,
        "speculators-dflash": _speculators,
    }[dialect]
    config, tensors = writer(config, tensors, "dflash" if is_plain_flash else "dspark")
    if draft_ids is not None:
        keep_ids(config, tensors, draft_ids, vocab_size=config["transformer_layer_config"]["vocab_size"])
    write_files(folder, laid_over(config, extra), tensors)
    return folder


def _same(config: Config, tensors: Tensors, kind: str) -> Written:
    return config, tensors


def _nemo_dspark(config: Config, tensors: Tensors, kind: str) -> Written:
    """A deep copy of the target's configuration as transformers 5 writes it, with DeepSpec's keys."""
    return {**config, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}, tensors


def _nemotron(config: Config, tensors: Tensors, kind: str) -> Written:
    """NVIDIA's: DeepSpec's name, mask first, and keys of vLLM in dflash_config. No embedding, no head."""
    own = {key: config.pop(key) for key in ("mask_token_id", "target_layer_ids")}
    nested = {"causal": True, "attention_sink_bias": True, "use_swa": True, "swa_window_size": 8}
    config.pop("layer_types", None)
    return {
        **config,
        "dspark_bonus_anchor": True,
        "eagle_aux_hidden_state_layer_ids": [each + 1 for each in own["target_layer_ids"]],
        "dflash_config": {**own, **nested, "sample_from_anchor": False},
    }, without(tensors, *_SHARED)


def _add_sinks(tensors: Tensors) -> None:
    """One logit for each head of each layer, large enough to be seen."""
    random = np.random.default_rng(5)
    for name in [each for each in tensors if each.endswith("q_proj.weight")]:
        at = name.removesuffix("q_proj.weight")
        heads = len(tensors[name]) // len(tensors[f"{at}q_norm.weight"])
        tensors[f"{at}attention_sink_bias"] = (1 + random.standard_normal(heads)).astype(np.float32)


def _zlab(config: Config, tensors: Tensors, kind: str) -> Written:
    plain = {key: value for key, value in config.items() if key not in (*_HEAD_KEYS, *_BLOCK_KEYS, "num_anchors")}
    own = {key: config[key] for key in ("mask_token_id", "target_layer_ids")}
    return {
        **plain,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": config["block_size"],
        "dflash_config": own,
    }, without(tensors, *_SHARED)


def _specforge(config: Config, tensors: Tensors, kind: str) -> Written:
    plain = {key: value for key, value in config.items() if key not in (*_HEAD_KEYS, *_BLOCK_KEYS, "num_anchors")}
    own = {key: config[key] for key in (*_HEAD_KEYS, "mask_token_id", "target_layer_ids") if key in config}
    own |= {"projector_type": "dspark", "confidence_head_alpha": 1.0, "attention_mode": "gqa"}
    return {
        **plain,
        "architectures": ["DSparkDraftModel"],
        "block_size": config["block_size"],
        "dflash_config": own,
    }, without(tensors, *_SHARED)


def _specforge_nested(config: Config, tensors: Tensors, kind: str) -> Written:
    """The first exports: heads below `logit_head`, their keys at the top level, that of the confidence head unsaid."""
    config, tensors = _specforge(config, tensors, kind)
    nested = config["dflash_config"]
    top = {key: nested.pop(key) for key in _HEAD_KEYS if key in nested}
    top.pop("enable_confidence_head", None)
    heads = ("markov_head.", "confidence_head.")
    return {**config, **top, "model_type": "dspark"}, {
        f"logit_head.{name}" if name.startswith(heads) else name: tensor for name, tensor in tensors.items()
    }


def _nemo_dflash(config: Config, tensors: Tensors, kind: str) -> Written:
    config, tensors = _zlab(config, tensors, kind)
    config.pop("auto_map")
    return {**config, "architectures": ["Qwen3DFlashDraftModel"]}, tensors


def _speculators(config: Config, tensors: Tensors, kind: str) -> Written:
    layer = {key: value for key, value in config.items() if key not in _OWN}
    top = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config["block_size"]}],
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": config["target_layer_ids"],
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "sample_from_anchor": True,
    }
    if kind == "dspark":
        top |= {key: config[key] for key in _HEAD_KEYS if key in config}
    return top, without(tensors, "embed_tokens.weight")


def keep_ids(config: Config, tensors: Tensors, draft_ids: NDArray[np.int64], *, vocab_size: int) -> None:
    """Rows of these target ids alone in the head and W2, and the two maps."""
    config["draft_vocab_size"] = len(draft_ids)
    for name in {"lm_head.weight", _W2} & set(tensors):
        tensors[name] = np.ascontiguousarray(tensors[name][draft_ids])
    tensors["d2t"] = draft_ids - np.arange(len(draft_ids))
    tensors["t2d"] = np.isin(np.arange(vocab_size), draft_ids)


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def laid_over(config: Config, extra: Config) -> Config:
    for key, value in extra.items():
        if value is None:
            config.pop(key, None)
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] = laid_over(config[key], value)
        else:
            config[key] = value
    return config


def write_files(folder: Path, config: Config, tensors: Tensors) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
