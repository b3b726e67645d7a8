"""Which tensors a checkpoint must have, and the check that it has exactly these.

Shape letters: `V` vocabulary, `W` draft vocabulary, `D` hidden, `M` tap layers, `N`/`K` query/KV heads, `H` head dim,
`r` Markov rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import (
    BlockDrafterSpec,
    DecoderSpec,
    DrafterSpec,
    Eagle3Spec,
    LanguageModelSpec,
    MedusaSpec,
    TargetSpec,
    WeightStore,
)
from dspark_trt.errors import CheckpointError

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
SINK = "layers.{}.self_attn.attention_sink_bias"  # of a layer of a block drafter
EXPERTS_UP, EXPERTS_DOWN = "mlp.experts.gate_up.weight", "mlp.experts.down.weight"  # of a layer
MASK = "layers.0.mask_rep"  # of DART: what the layer reads where there is neither token nor feature
FLOAT_DTYPES = ("float32", "float16", "bfloat16")

Shapes = dict[str, tuple[int, ...]]

_CHUNK_ELEMENTS = 1 << 24
# Beyond any checkpoint, and far below what listing the tensors of a wrong configuration would take.
_MAX_LAYERS = 1024
_MAX_SIZE = 1 << 24
_SIZES = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")


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


def check_sizes(spec: DecoderSpec, where: str) -> None:
    """Raises CheckpointError for sizes that no model has, before anything is allocated for them."""
    limits = {"num_layers": _MAX_LAYERS, **dict.fromkeys(_SIZES, _MAX_SIZE)}
    for name, most in limits.items():
        _check_size(getattr(spec, name), name, most, where)
    for shape in {spec.shape_of(layer) for layer in range(spec.num_layers)}:
        _check_size(shape.num_kv_heads, "num_kv_heads", _MAX_SIZE, where)
        _check_size(shape.head_dim, "head_dim", _MAX_SIZE, where)
        rope = shape.rope
        numbers = {"rms_norm_eps": spec.rms_norm_eps, "rope theta": rope.theta, "rope factor": rope.factor or 1.0}
        for name, number in numbers.items():
            if not (math.isfinite(number) and number > 0):
                raise CheckpointError(
                    f"{where}: {name}: expected a positive number, found {number}; the file is damaged"
                )


def _check_size(found: int, name: str, most: int, where: str) -> None:
    if not 1 <= found <= most:
        raise CheckpointError(f"{where}: {name}: expected 1 to {most}, found {found}; the file is damaged")


def check_tensors(weights: WeightStore, expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Every expected tensor is there with its shape and a float element type, and there is no other one.

    Raises CheckpointError that names the tensor, what was expected and what was found.
    """
    found = weights.names()
    for name in expected:
        if name not in found:
            raise CheckpointError(
                f"{where}: tensor {name} is missing (expected shape {list(expected[name])}, one of "
                f"{len(expected)} tensors, found {len(found)}); download the checkpoint again or correct its "
                "config.json"
            )
    unexpected = [name for name in found if name not in expected]
    if unexpected:
        found_shape = list(weights.info(unexpected[0]).shape)
        more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
        raise CheckpointError(
            f"{where}: tensor {unexpected[0]} with shape {found_shape}{more} is not expected: config.json does not "
            "say what it is for, and leaving it out would change the output. Correct config.json, or use a checkpoint "
            "of a supported form"
        )
    for name, shape in expected.items():
        info = weights.info(name)
        if info.shape != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(info.shape)}, expected {list(shape)} from config.json; the "
                "weights and the configuration do not belong together"
            )
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{where}: tensor {name} has element type {info.dtype}, expected one of {', '.join(FLOAT_DTYPES)}; "
                "use the unquantised checkpoint"
            )


def check_token_ids(spec: TargetSpec, where: str) -> None:
    """Raises CheckpointError when an end token lies outside the vocabulary: no text would ever end by it."""
    for token in spec.eos_token_ids:
        if not 0 <= token < spec.decoder.vocab_size:
            raise CheckpointError(
                f"{where}: token id {token} (eos_token_id) is outside the vocabulary of "
                f"{spec.decoder.vocab_size}; correct the checkpoint's configuration"
            )


def check_finite(weights: WeightStore, where: str) -> None:
    """Reads every weight once. Raises CheckpointError that names the first tensor with NaN or infinite elements."""
    for name in weights.names():
        array = weights.array(name)
        num_bad = sum(int(np.count_nonzero(~_is_finite(chunk))) for chunk in _chunks(array))
        if num_bad:
            raise CheckpointError(
                f"{where}: tensor {name} has {num_bad} NaN or infinite elements out of {array.size}; download the "
                "checkpoint again, or use another one"
            )


def is_equal(left: NDArray[np.generic], right: NDArray[np.generic]) -> bool:
    """Whether two tensors hold the same numbers, whatever their element types; stops at the first difference."""
    if left.shape != right.shape:
        return False
    pairs = zip(_chunks(left), _chunks(right), strict=True)
    return all(np.array_equal(a.astype(np.float32), b.astype(np.float32)) for a, b in pairs)


def _chunks(array: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    """Views of at most about `_CHUNK_ELEMENTS` elements, so that a mapped file is never copied whole."""
    flat = array.reshape(-1)
    return [flat[start : start + _CHUNK_ELEMENTS] for start in range(0, flat.size, _CHUNK_ELEMENTS)]


def _is_finite(chunk: NDArray[np.generic]) -> NDArray[np.bool_]:
    """All exponent bits set means NaN or infinite; integer arithmetic, since numpy has no fast path for bfloat16."""
    exponent = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[chunk.dtype.name]
    bits: Any = chunk.view(f"u{chunk.dtype.itemsize}")
    finite: NDArray[np.bool_] = (bits & exponent) != exponent
    return finite
