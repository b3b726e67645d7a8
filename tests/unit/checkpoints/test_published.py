"""Configurations of published models pass: nothing in them is refused, and the numbers are those of the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.checkpoints.drafters.formats import read_description
from dspark_trt.checkpoints.spec import RopeSpec
from dspark_trt.checkpoints.target import read_target_spec

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
QWEN2_5_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DRAFTER_KEYS: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "num_target_layers": 36,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "block_size": 7,
    "num_anchors": 512,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "loss_decay_gamma": 4.0,
}
DSPARK_QWEN3_8B = (
    QWEN3_8B
    | DRAFTER_KEYS
    | {
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
)
DFLASH_QWEN3_8B = QWEN3_8B | DRAFTER_KEYS | {"markov_rank": 0, "enable_confidence_head": False}

ZLAB_DFLASH_QWEN3_8B = QWEN3_8B | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "layer_types": ["full_attention"] * 5,
    "max_window_layers": 5,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
}


@pytest.mark.parametrize(
    ("values", "heads", "rope"),
    [
        (QWEN3_8B, (36, 32, 8, 128), RopeSpec(1e6)),
        (
            LLAMA_3_2_1B,
            (16, 32, 8, 64),
            RopeSpec(
                5e5,
                "llama3",
                factor=32.0,
                original_max_position_embeddings=8192,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
        ),
        (SMOLLM2_135M, (30, 9, 3, 64), RopeSpec(1e5)),
        (QWEN2_5_7B, (28, 28, 4, 128), RopeSpec(1e6)),
        (MISTRAL_7B, (32, 32, 8, 128), RopeSpec(1e4)),
        (QWEN3_30B_A3B, (48, 32, 4, 128), RopeSpec(1e6)),
    ],
    ids=["Qwen3-8B", "Llama-3.2-1B", "SmolLM2-135M", "Qwen2.5-7B", "Mistral-7B", "Qwen3-30B-A3B"],
)
def test_published_target_is_accepted(tmp_path: Path, values: dict, heads: tuple[int, ...], rope: RopeSpec) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec = read_target_spec(str(tmp_path)).decoder
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == heads
    assert spec.rope == rope


@pytest.mark.parametrize(
    ("values", "gamma", "is_mask_first"),
    [(DSPARK_QWEN3_8B, 7, False), (DFLASH_QWEN3_8B, 7, False), (ZLAB_DFLASH_QWEN3_8B, 15, True)],
    ids=["dspark", "dflash", "z-lab dflash"],
)
def test_published_drafter_is_accepted(values: dict, gamma: int, is_mask_first: bool) -> None:
    spec = read_description(values, "config.json").spec
    assert (spec.gamma, spec.mask_token_id, spec.num_target_layers) == (gamma, 151669, 36)
    assert (spec.is_mask_first, spec.target_layer_ids) == (is_mask_first, (1, 9, 17, 25, 33))
    assert spec.decoder.num_layers == 5
