"""Keys of config.json that stand for features that are not implemented, and the values that say that they are not used.

Any other value is refused by name, since ignoring it would give wrong output silently.
"""

from __future__ import annotations

from typing import Any

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    # rotary variants
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_interleaved": (False,),
    "rope_interleave": (False,),
    "rope_is_neox_style": (True,),
    "is_neox_style": (True,),
    "no_rope_layers": (),
    "use_mrope": (False,),
    # attention variants
    "use_swa": (False,),
    "swa_window_size": (),
    "sliding_window_non_causal": (False,),
    "attention_sink_bias": (False,),
    "attention_sinks": (False,),
    "attention_k_eq_v": (False,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False,),
    "kv_lora_rank": (),
    "clip_qkv": (),
    "add_cross_attention": (False,),
    # scales of embedding, residual stream and logits
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "final_logit_softcapping": (),
    # mixture of experts
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    # weights that are not plain numbers
    "quantization_config": (),
    "compression_config": (),
}
