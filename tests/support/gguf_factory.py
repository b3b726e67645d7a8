"""GGUF files from what `tests.support.factories` writes, the way llama.cpp's converter makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[Any]
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
ARCHITECTURES = {"qwen3_moe": "qwen3moe"}  # where GGUF calls a family otherwise


def write_gguf(
    path: Path,
    folder: Path,
    *,
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array] | None = None,
) -> Path:
    """Convert the target in `folder`. `metadata` is laid over the architecture's keys,
    `tensors` are added as they are."""
    config = json.loads((folder / "config.json").read_text())
    family = ARCHITECTURES.get(config["model_type"], config["model_type"])
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, family)
    for key, value in values.items():
        if value is not None:
            _add(writer, f"{family}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    stored: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    for name, tensor in _with_stacks(stored).items():
        if tensor.ndim == 3:
            writer.add_tensor(name, tensor)
            continue
        array = np.ascontiguousarray(_permuted(name, tensor.astype(np.float32), config))
        if array.ndim == 2:
            writer.add_tensor(_name(name), gguf.quantize(array, matrix_type), raw_dtype=matrix_type)
        else:
            writer.add_tensor(_name(name), array)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    _write(writer)
    return path


def write_tokenizer_gguf(
    path: Path,
    *,
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[str],
    pre: str | None,
    model: str = "gpt2",
    chat_template: str | None = None,
    add_bos: bool | None = None,
    special_ids: Mapping[str, int] | None = None,
) -> Path:
    """A GGUF file with a tokenizer and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    writer.add_token_merges(list(merges))
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    for key, value in (special_ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    _write(writer)
    return path


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _with_stacks(tensors: dict[str, Array]) -> dict[str, Array]:
    """With the experts of a layer in three stacks, which have their names in the file."""
    rest, experts = {}, {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            rest[name] = tensor
            continue
        _, _, layer, _, _, expert, module, _ = name.split(".")
        kind = module.removesuffix("_proj")
        experts.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", {})[int(expert)] = tensor
    return rest | {name: np.stack([parts[index] for index in sorted(parts)]) for name, parts in experts.items()}


def _name(name: str) -> str:
    whole_model = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole_model:
        return whole_model[name]
    _, _, index, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{NAMES[module]}.{kind}"


def _permuted(name: str, tensor: Array, config: dict[str, Any]) -> Array:
    """The converter's permutation of Q and K: rows (half, pair) of each head become (pair, half). Llama family only."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if config["model_type"] != "llama" or part not in heads:
        return tensor
    split = tensor.reshape(heads[part], 2, tensor.shape[0] // heads[part] // 2, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape)
