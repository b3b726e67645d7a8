"""Tiny random Gemma 4 targets, saved by transformers itself, and drafters for them in DeepSpec's form.

Sizes differ between sliding and full layers, and the window and the cap of the logits are small, so that every one of
them shows in the logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    PreTrainedModel,
)

from tests.support.factories import write_tokenizer_files

ModelType = Literal["gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"]
TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "final_logit_softcapping": 5.0,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_VISION = {"mm_embed_dim": 32, "output_proj_dims": 32, "patch_size": 2, "mm_posemb_size": 4}
_AUDIO = {"audio_embed_dim": 8}


def write_gemma_target(
    folder: Path,
    model_type: ModelType = "gemma4_unified_text",
    *,
    has_other_parts: bool = False,
    tokenizer: bool = False,
    seed: int = 0,
    **keys: Any,
) -> Path:
    """`keys` of the text configuration. `has_other_parts`: vision and audio, of `gemma4_unified`."""
    text = TEXT | keys
    if model_type.startswith("gemma4_unified"):
        config: Any = Gemma4UnifiedTextConfig(**text)
    else:
        config = Gemma4TextConfig(hidden_size_per_layer_input=0, vocab_size_per_layer_input=text["vocab_size"], **text)
    if model_type == "gemma4":
        config = Gemma4Config(text_config=config)
    elif model_type == "gemma4_unified":
        parts = {"vision_config": _VISION, "audio_config": _AUDIO} if has_other_parts else {}
        config = Gemma4UnifiedConfig(text_config=config, **parts)
    model = {
        "gemma4": Gemma4ForConditionalGeneration,
        "gemma4_text": Gemma4ForCausalLM,
        "gemma4_unified": Gemma4UnifiedForConditionalGeneration,
        "gemma4_unified_text": Gemma4UnifiedForCausalLM,
    }[model_type](config)
    _randomise(model, text["hidden_size"], seed)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    if tokenizer:
        write_tokenizer_files(folder, text["vocab_size"])
    return folder


def _randomise(model: PreTrainedModel, hidden: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, scale: float, mean: float = 0.0) -> None:
        tensor.copy_(mean + scale * torch.randn(tensor.shape, generator=random))

    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if "embed_tokens" in name or name == "lm_head.weight":
                normal(tensor, 3 / hidden**0.5)
            elif "norm" in name or "layer_scalar" in name:
                normal(tensor, 0.1, 1.0)
            else:
                normal(tensor, 1.5 / max(1, tensor.shape[-1]) ** 0.5)


def write_gemma_drafter(
    folder: Path,
    target: Path,
    *,
    taps: tuple[int, ...] = (-1, 0, 2),
    gamma: int = 5,
    layers: int = 2,
    markov_rank: int = 8,
    confidence: bool = True,
    has_own_embedding: bool = False,
    seed: int = 1,
    **keys: Any,
) -> Path:
    """A `Gemma4DSparkModel`: the target's text configuration with DeepSpec's keys, and tensors of its names."""
    config = json.loads((target / "config.json").read_text())
    config = {**config.get("text_config", config)}
    full = config.pop("per_layer_config")["1"]  # DeepSpec's files have the older keys
    config |= {
        "global_head_dim": full["head_dim"],
        "num_global_key_value_heads": full.get("num_key_value_heads"),
        "architectures": ["Gemma4DSparkModel"],
        "target_model_type": config["model_type"].removesuffix("_text"),
        "target_text_model_type": config["model_type"],
        "num_target_layers": config["num_hidden_layers"],
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": False,
        "block_size": gamma,
        "mask_token_id": 4,
        "target_layer_ids": list(taps),
        "num_anchors": 16,
        "markov_rank": markov_rank,
        "enable_confidence_head": confidence,
    }
    if markov_rank:
        config["markov_head_type"] = "vanilla"
    if confidence:
        config["confidence_head_with_markov"] = markov_rank > 0
    stored = load_file(target / "model.safetensors")
    embedding = next(tensor for name, tensor in stored.items() if name.endswith("embed_tokens.weight"))
    tensors = _drafter_tensors(config, len(taps), seed)
    if has_own_embedding:
        random = np.random.default_rng(seed + 1)
        embedding = (random.standard_normal(embedding.shape) * 3 / embedding.shape[1] ** 0.5).astype(np.float32)
    tensors |= {"embed_tokens.weight": embedding, "lm_head.weight": embedding.copy()}
    folder.mkdir(parents=True, exist_ok=True)
    config |= keys
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    return folder


def write_gemma_eagle3(folder: Path, target: Path, *, taps: tuple[int, ...] = (0, 1, 3), **more: Any) -> Path:
    """A `Gemma4Eagle3Model`: one layer made like the target's full ones, whose projections read embedding and feature
    side by side. `more`: options of `write_gemma_drafter`."""
    own = {"ttt_length": more.pop("ttt_length", 5), "step_loss_decay": 0.8, "draft_num_hidden_layers": 1}
    write_gemma_drafter(folder, target, taps=taps, layers=1, markov_rank=0, confidence=False, **more)
    config = json.loads((folder / "config.json").read_text())
    not_its = ("block_size", "mask_token_id", "num_anchors", "markov_rank", "enable_confidence_head")
    config = {key: value for key, value in config.items() if key not in not_its}
    config |= own | {"architectures": ["Gemma4Eagle3Model"], "target_model_name_or_path": "google/gemma-4-12B-it"}
    tensors, random = load_file(folder / "model.safetensors"), np.random.default_rng(7)
    for name in [each for each in tensors if each.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        second = random.standard_normal(tensors[name].shape) / tensors[name].shape[1] ** 0.5
        tensors[name] = np.concatenate([tensors[name], second.astype(np.float32)], axis=1)
    tensors["layers.0.hidden_norm.weight"] = tensors.pop("hidden_norm.weight")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    return folder


def _drafter_tensors(config: dict[str, Any], num_taps: int, seed: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    hidden, head_dim, rank = config["hidden_size"], config["global_head_dim"], config["markov_rank"]
    is_shared = config["attention_k_eq_v"]
    kv = head_dim * (config["num_global_key_value_heads"] if is_shared else config["num_key_value_heads"])
    query, intermediate = config["num_attention_heads"] * head_dim, config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, num_taps * hidden)}
    norms = {"norm.weight": hidden, "hidden_norm.weight": hidden}
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        shapes |= {f"{at}self_attn.q_proj.weight": (query, hidden), f"{at}self_attn.k_proj.weight": (kv, hidden)}
        shapes |= {} if is_shared else {f"{at}self_attn.v_proj.weight": (kv, hidden)}
        shapes |= {f"{at}self_attn.o_proj.weight": (hidden, query), f"{at}mlp.down_proj.weight": (hidden, intermediate)}
        shapes |= {f"{at}mlp.{which}_proj.weight": (intermediate, hidden) for which in ("gate", "up")}
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        norms |= {f"{at}{name}_layernorm.weight": hidden for name in names}
        norms |= {f"{at}self_attn.{which}_norm.weight": head_dim for which in ("q", "k")} | {f"{at}layer_scalar": 1}
    tensors = {name: random.standard_normal(shape) * 1.5 / shape[-1] ** 0.5 for name, shape in shapes.items()}
    tensors |= {name: 1 + 0.1 * random.standard_normal(size) for name, size in norms.items()}
    if rank:
        vocab = (config["vocab_size"], rank)
        tensors["markov_head.markov_w1.weight"] = random.standard_normal(vocab)
        tensors["markov_head.markov_w2.weight"] = random.standard_normal(vocab) * 1.5 / rank**0.5
    if config["enable_confidence_head"]:
        width = hidden + (rank if config["confidence_head_with_markov"] else 0)
        tensors["confidence_head.proj.weight"] = random.standard_normal((1, width)) / width**0.5
        tensors["confidence_head.proj.bias"] = np.array([0.7])
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
