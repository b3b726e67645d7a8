"""Random tiny checkpoints on disk, in the layouts that real ones have.

Weights are scaled so that logits have a standard deviation of about 3 and the transition bias and the confidence logits
of about 1: argmaxes are well separated, sampling is not uniform, and no layer is a near-identity.
Everything is a function of `seed`, so a test can write the same checkpoint twice. One file, longer than is the habit
here, because target and drafter share the helpers that make their tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Tensors = dict[str, NDArray[Any]]
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TOKENIZER_CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "It's 12345 and 3.14, isn't it?\nYes\tit is",
    "def main():\n    return [x for x in range(10)]",
    "naïve café, 東京 and 🦊",
)


def write_target(
    folder: Path,
    *,
    family: Literal["llama", "qwen3"] = "llama",
    vocab_size: int = 97,
    layers: int = 4,
    hidden: int = 32,
    intermediate: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    tied: bool = False,
    biases: bool = False,
    mlp_biases: bool | None = None,
    rope: dict[str, Any] | None = None,
    rope_style: Literal["parameters", "scaling"] = "parameters",
    max_positions: int = 512,
    dtype: str = "float32",
    shards: int = 1,
    eos_token_ids: Sequence[int] = (2, 3),
    generation: dict[str, Any] | None = None,
    tokenizer: bool = False,
    config_extra: dict[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a dense target in Hugging Face layout and return its folder.

    `rope` is a dictionary as under `rope_parameters` (with rope_theta); `rope_style` "scaling" writes it as
    transformers 4 did (rope_theta at top level, the rest under rope_scaling). `biases` are those of attention,
    `mlp_biases` (llama only) follow them. config.json gets the first of `eos_token_ids`, generation_config.json all.
    `tokenizer` writes a byte-level BPE of exactly `vocab_size` tokens (at least 260; ids 0..3 are special) with a chat
    template. `config_extra` is laid over config.json alone, not over the tensors; a value of None removes the key.
    """
    head_dim = head_dim or hidden // heads
    mlp_biases = (biases and family == "llama") if mlp_biases is None else mlp_biases
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max_positions,
        "attention_bias": biases,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": eos_token_ids[0],
        "dtype": dtype,
    }
    if family == "llama":
        config["mlp_bias"] = mlp_biases
    config |= _rope_keys(rope or DEFAULT_ROPE, rope_style)
    random = np.random.default_rng(seed)
    tensors = _decoder_tensors(random, config, qk_norm=family == "qwen3")
    tensors["embed_tokens.weight"] = _normal(random, (vocab_size, hidden), 3 / hidden**0.5)
    tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    if not tied:
        tensors["lm_head.weight"] = _normal(random, (vocab_size, hidden), 3 / hidden**0.5)
    _write_json(folder / "config.json", config | (config_extra or {}))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": list(eos_token_ids), **(generation or {})},
    )
    _save(folder, tensors, dtype, shards)
    if tokenizer:
        write_tokenizer_files(folder, vocab_size)
    return folder


def write_drafter(
    folder: Path,
    target: Path,
    *,
    head_type: Literal["vanilla", "gated", "rnn"] = "vanilla",
    markov_rank: int = 8,
    confidence: bool = True,
    confidence_bias: bool = True,
    confidence_with_markov: bool | None = None,
    embed_head: Literal["absent", "equal", "different"] = "absent",
    layers: int = 3,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    taps: Iterable[int] = (0, 2),
    gamma: int = 5,
    mask_token_id: int | None = None,
    rope: dict[str, Any] | None = None,
    dtype: str = "float32",
    shards: int = 1,
    config_extra: dict[str, Any] | None = None,
    seed: int = 1,
) -> Path:
    """Write a drafter in DeepSpec's layout for the target that `write_target` wrote, and return its folder.

    `markov_rank` 0 is DeepSpec's DFlash (no head keys, no head tensors). `confidence_with_markov` is true by default
    where there is a Markov head. `embed_head` says whether the file has embed_tokens and lm_head, and whether they
    equal the target's. `mask_token_id` is the last id of the vocabulary by default.
    """
    target_config = json.loads((target / "config.json").read_text())
    hidden, vocab_size = target_config["hidden_size"], target_config["vocab_size"]
    taps = tuple(taps)
    with_markov = (markov_rank > 0) if confidence_with_markov is None else confidence_with_markov
    config: dict[str, Any] = {
        **target_config,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_target_layers": target_config["num_hidden_layers"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads or target_config["num_attention_heads"],
        "num_key_value_heads": kv_heads or target_config["num_key_value_heads"],
        "head_dim": head_dim or target_config["head_dim"],
        "layer_types": ["full_attention"] * layers,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": gamma,
        "mask_token_id": vocab_size - 1 if mask_token_id is None else mask_token_id,
        "target_layer_ids": list(taps),
        "num_anchors": 16,
        "markov_rank": markov_rank,
        "enable_confidence_head": confidence,
        "dtype": dtype,
    }
    config.pop("mlp_bias", None)
    if markov_rank:
        config["markov_head_type"] = head_type
    if confidence:
        config["confidence_head_with_markov"] = with_markov
    if rope:
        for key in ("rope_theta", "rope_scaling"):
            config.pop(key, None)
        config |= _rope_keys(rope, "parameters")
    random = np.random.default_rng(seed)
    tensors = _decoder_tensors(random, config, qk_norm=True)
    tensors["fc.weight"] = _linear(random, hidden, len(taps) * hidden)
    tensors["hidden_norm.weight"] = _norm(random, hidden)
    if markov_rank:
        tensors |= _markov_tensors(random, head_type, vocab_size, markov_rank, hidden)
    if confidence:
        tensors["confidence_head.proj.weight"] = _linear(random, 1, hidden + (markov_rank if with_markov else 0))
        if confidence_bias:
            tensors["confidence_head.proj.bias"] = np.array([0.7], np.float32)
    if embed_head == "equal":
        tensors |= target_embed_and_head(target)
    elif embed_head == "different":
        for name in ("embed_tokens.weight", "lm_head.weight"):
            tensors[name] = _normal(random, (vocab_size, hidden), 3 / hidden**0.5)
    _write_json(folder / "config.json", config | (config_extra or {}))
    _save(folder, tensors, dtype, shards)
    return folder


def target_embed_and_head(target: Path) -> Tensors:
    """The target's embedding and head as float32; the head is the embedding where they are tied."""
    tensors: Tensors = {}
    for file in sorted(target.glob("*.safetensors")):
        tensors |= load_file(file)
    embedding = tensors["model.embed_tokens.weight"].astype(np.float32)
    head = tensors.get("lm_head.weight", embedding).astype(np.float32)
    return {"embed_tokens.weight": embedding, "lm_head.weight": head}


def write_tokenizer_files(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE with ids 0 <unk>, 1 <s>, 2 <|im_end|>, 3 <|im_start|>, all 256 bytes, and a few merges.

    The vocabulary is topped up with rare words so that every id below `vocab_size` decodes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = ["<unk>", "<s>", "<|im_end|>", "<|im_start|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_CORPUS, trainer)
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(f"a byte-level tokenizer needs at least {tokenizer.get_vocab_size()} ids, got {vocab_size}")
    num_missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<extra_{index}>", normalized=False) for index in range(num_missing)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )


def _decoder_tensors(random: np.random.Generator, config: dict[str, Any], *, qk_norm: bool) -> Tensors:
    hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key_value = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    tensors: Tensors = {"norm.weight": _norm(random, hidden)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        for name, (rows, columns) in shapes.items():
            tensors[f"{prefix}{name}.weight"] = _linear(random, rows, columns, gain=1.5)
            if config.get("attention_bias" if "attn" in name else "mlp_bias"):
                tensors[f"{prefix}{name}.bias"] = _normal(random, (rows,), 0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = _norm(random, hidden)
        if qk_norm:
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}self_attn.{name}.weight"] = _norm(random, head_dim)
    return tensors


def _markov_tensors(random: np.random.Generator, head_type: str, vocab_size: int, rank: int, hidden: int) -> Tensors:
    tensors = {
        "markov_head.markov_w1.weight": _normal(random, (vocab_size, rank), 1.0),
        "markov_head.markov_w2.weight": _normal(random, (vocab_size, rank), 1.5 / rank**0.5),
    }
    if head_type == "gated":
        tensors["markov_head.gate_proj.weight"] = _linear(random, rank, hidden + rank)
        tensors["markov_head.gate_proj.bias"] = _normal(random, (rank,), 0.3)
    if head_type == "rnn":
        tensors["markov_head.joint_proj.weight"] = _linear(random, 3 * rank, 2 * rank + hidden)
        tensors["markov_head.joint_proj.bias"] = _normal(random, (3 * rank,), 0.3)
    return tensors


def _rope_keys(rope: dict[str, Any], style: str) -> dict[str, Any]:
    if style == "parameters":
        return {"rope_parameters": dict(rope)}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_default = scaling.get("rope_type") == "default"
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if is_default else scaling}


def _linear(random: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
    return _normal(random, (rows, columns), gain / columns**0.5)


def _norm(random: np.random.Generator, size: int) -> NDArray[np.float32]:
    return 1 + _normal(random, (size,), 0.1)


def _normal(random: np.random.Generator, shape: tuple[int, ...], scale: float) -> NDArray[np.float32]:
    return (random.standard_normal(shape) * scale).astype(np.float32)


def _save(folder: Path, tensors: Tensors, dtype: str, shards: int) -> None:
    tensors = {name: np.ascontiguousarray(tensor.astype(DTYPES[dtype])) for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # as a download is; safetensors writes for the owner alone
        return
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + i % shards:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}, indent=2))
