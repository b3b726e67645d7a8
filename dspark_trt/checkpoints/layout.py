"""Which tensors a checkpoint must have.

Shape letters: `V` vocabulary, `W` draft vocabulary, `D` hidden, `M` tap layers, `N`/`K` query/KV heads, `H` head dim,
`r` Markov rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from dspark_trt.checkpoints.spec import (
    BlockDrafterSpec,
    DecoderSpec,
    DrafterSpec,
    Eagle3Spec,
    LanguageModelSpec,
    MedusaSpec,
    TargetSpec,
)

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
SINK = "layers.{}.self_attn.attention_sink_bias"  # of a layer of a block drafter
EXPERTS_UP, EXPERTS_DOWN = "mlp.experts.gate_up.weight", "mlp.experts.down.weight"  # of a layer
MASK = "layers.0.mask_rep"  # of DART: what the layer reads where there is neither token nor feature

Shapes = dict[str, tuple[int, ...]]


def target_shapes(spec: TargetSpec) -> Shapes:
    """Canonical name -> shape of every tensor of a target."""
    vocabulary = (spec.decoder.vocab_size, spec.decoder.hidden_size)
    shapes = _decoder_shapes(spec.decoder) | {EMBEDDING: vocabulary}
    return shapes if spec.is_head_tied else shapes | {HEAD: vocabulary}


def drafter_shapes(spec: DrafterSpec) -> Shapes:
    """Canonical name -> shape of every tensor of a drafter."""
    shapes = {} if isinstance(spec, MedusaSpec) else _decoder_shapes(spec.decoder)
    if spec.has_own_embedding:
        shapes[EMBEDDING] = (spec.decoder.vocab_size, spec.decoder.hidden_size)
    if spec.has_own_head:
        shapes[HEAD] = (spec.num_draft_ids, spec.decoder.hidden_size)
    match spec:
        case BlockDrafterSpec():
            return shapes | _block_shapes(spec)
        case Eagle3Spec():
            return shapes | _eagle3_shapes(spec)
        case MedusaSpec():
            return shapes | _medusa_shapes(spec)
        case LanguageModelSpec():
            return shapes | {EMBEDDING: (spec.num_draft_ids, spec.decoder.hidden_size)}


def _block_shapes(spec: BlockDrafterSpec) -> Shapes:
    """Of what a block drafter has besides its decoder layers. Source: paper section 3.1, eq. 2-7."""
    V, D, W, r = spec.decoder.vocab_size, spec.decoder.hidden_size, spec.num_draft_ids, spec.markov_rank
    shapes: Shapes = {"fc.weight": (D, spec.num_taps * D), "hidden_norm.weight": (D,)}
    if r:
        shapes |= {"markov_head.markov_w1.weight": (V, r), "markov_head.markov_w2.weight": (W, r)}
    if r and spec.markov_head_type == "gated":
        shapes |= {"markov_head.gate_proj.weight": (r, D + r), "markov_head.gate_proj.bias": (r,)}
    if r and spec.markov_head_type == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + D), "markov_head.joint_proj.bias": (3 * r,)}
    if spec.has_confidence_head:
        shapes["confidence_head.proj.weight"] = (1, D + (r if spec.is_confidence_with_markov else 0))
    if spec.has_confidence_bias:
        shapes["confidence_head.proj.bias"] = (1,)
    with_sink = [layer for layer in range(spec.decoder.num_layers) if spec.attention_of(layer).has_sink]
    return shapes | {SINK.format(layer): (spec.decoder.num_heads,) for layer in with_sink}


def _eagle3_shapes(spec: Eagle3Spec) -> Shapes:
    """Of what an EAGLE-3 drafter has besides a decoder layer, and of projections of two inputs side by side."""
    D, M, decoder = spec.decoder.hidden_size, spec.num_taps, spec.decoder
    if spec.is_module:
        return {"fc.weight": (D, 2 * D), "token_norm.weight": (D,), "hidden_norm.weight": (D,)}
    shapes: Shapes = {"fc.weight": (D, M * D), "layers.0.hidden_norm.weight": (D,)}
    of_kv = ("k",) if decoder.shape_of(0).is_value_of_key else ("k", "v")
    for name, num_heads in {"q": decoder.num_heads, **dict.fromkeys(of_kv, decoder.num_kv_heads)}.items():
        shapes[f"layers.0.self_attn.{name}_proj.weight"] = (num_heads * decoder.head_dim, 2 * D)
    if spec.is_masked:
        shapes[MASK] = (2 * D,)
    if spec.tap_norm == "joint":
        shapes["input_norm.weight"] = (M * D,)
    if spec.tap_norm == "each":
        shapes |= {f"fc_norm.{tap}.weight": (D,) for tap in range(M)}
    return shapes


def _medusa_shapes(spec: MedusaSpec) -> Shapes:
    """Of the heads. Source: Medusa (arXiv 2401.10774), section 2.1."""
    D, shapes = spec.decoder.hidden_size, Shapes()
    for head in range(spec.gamma):
        for block in range(spec.num_blocks):
            shapes[f"heads.{head}.blocks.{block}.weight"] = (D, D)
            if spec.has_block_bias:
                shapes[f"heads.{head}.blocks.{block}.bias"] = (D,)
        if not spec.is_head_shared:
            shapes[f"heads.{head}.lm_head.weight"] = (spec.num_draft_ids, D)
    return shapes


def _decoder_shapes(spec: DecoderSpec) -> Shapes:
    shapes: Shapes = {"norm.weight": (spec.hidden_size,)}
    for index in range(spec.num_layers):
        layer = _attention_shapes(spec, index) | (_expert_shapes(spec, index) or _mlp_shapes(spec))
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention_shapes(spec: DecoderSpec, layer: int) -> Shapes:
    """Of a layer's attention and of all norms."""
    D, attention = spec.hidden_size, spec.shape_of(layer)
    query, key_value = spec.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    linears = {
        "self_attn.q_proj": ((query, D), spec.has_qkv_bias),
        "self_attn.k_proj": ((key_value, D), spec.has_qkv_bias),
        "self_attn.v_proj": ((key_value, D), spec.has_qkv_bias),
        "self_attn.o_proj": ((D, query), spec.has_o_bias),
    }
    if attention.is_value_of_key:
        del linears["self_attn.v_proj"]
    shapes = _linear_shapes(linears) | {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    if spec.has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (attention.head_dim,), "self_attn.k_norm.weight": (attention.head_dim,)}
    if spec.gemma is not None:
        shapes |= {f"{place}_feedforward_layernorm.weight": (D,) for place in ("pre", "post")} | {"layer_scalar": (1,)}
    return shapes


def _mlp_shapes(spec: DecoderSpec) -> Shapes:
    return _linear_shapes(
        {
            "mlp.gate_proj": ((spec.intermediate_size, spec.hidden_size), spec.has_mlp_bias),
            "mlp.up_proj": ((spec.intermediate_size, spec.hidden_size), spec.has_mlp_bias),
            "mlp.down_proj": ((spec.hidden_size, spec.intermediate_size), spec.has_mlp_bias),
        }
    )


def _expert_shapes(spec: DecoderSpec, layer: int) -> Shapes:
    """Nothing where that layer has an MLP."""
    experts, D = spec.experts_of(layer), spec.hidden_size
    if experts is None:
        return {}
    E, inner, shared = experts.num_experts, experts.intermediate_size, experts.shared_intermediate_size
    shapes: Shapes = {"mlp.gate.weight": (E, D), EXPERTS_UP: (E, 2 * inner, D), EXPERTS_DOWN: (E, D, inner)}
    if shared is not None:
        shapes |= {f"mlp.shared_expert.{each}_proj.weight": (shared, D) for each in ("gate", "up")}
        shapes |= {"mlp.shared_expert.down_proj.weight": (D, shared), "mlp.shared_expert_gate.weight": (1, D)}
    return shapes


def _linear_shapes(linears: Mapping[str, tuple[tuple[int, int], bool]]) -> Shapes:
    """Of weights, and of biases where there are any."""
    shapes: Shapes = {f"{name}.weight": shape for name, (shape, _) in linears.items()}
    return shapes | {f"{name}.bias": shape[:1] for name, (shape, has_bias) in linears.items() if has_bias}
