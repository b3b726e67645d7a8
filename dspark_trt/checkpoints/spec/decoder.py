"""The decoder stack of a target or a drafter, and what a target has besides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn", "proportional"]
Family = Literal[  # of targets: `model_type`
    "llama", "qwen2", "qwen3", "mistral", "ministral", "phi3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma4", "mimo"
]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Parameters that a `rope_type` does not use stay None."""

    theta: float
    rope_type: RopeType = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    partial_rotary_factor: float | None = None  # proportional: share of the pairs that turn, the fastest ones


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The attention of one layer, where layers differ."""

    num_kv_heads: int  # K
    head_dim: int  # H
    rope: RopeSpec
    is_value_of_key: bool = False  # there is no v_proj: values are what k_proj gives, before norm and rotation


@dataclass(frozen=True, slots=True)
class GemmaSpec:
    """What Gemma 4's decoder has beyond Llama's.

    Embeddings are multiplied by sqrt(D). Attention and MLP have a norm before and another behind, and the output of a
    layer is multiplied by its layer_scalar. Values pass through a norm without weight; scores are not scaled. The MLP's
    activation is GELU in its tanh form.
    """

    layers: tuple[LayerShape, ...]
    logit_softcap: float | None = None  # c: logits are c * tanh(logits / c)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in the place of the MLP of some layers: a router gives each token a few of them."""

    layers: tuple[int, ...]  # that have experts; the others have an MLP
    num_experts: int  # E
    num_active: int  # experts of one token, those of the largest probabilities
    intermediate_size: int  # I, of one expert
    is_normalised: bool  # the chosen probabilities are divided by their sum
    shared_intermediate_size: int | None = None  # of one more expert, for all tokens, behind a sigmoid gate


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The decoder stack that target and drafter share."""

    num_layers: int
    hidden_size: int  # D
    intermediate_size: int
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    vocab_size: int  # V
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    has_qk_norm: bool
    has_qkv_bias: bool  # biases on q, k and v
    has_o_bias: bool
    has_mlp_bias: bool
    layer_windows: tuple[int | None, ...] = ()  # of a target's layers, see `window_of`; empty: all see everything
    experts: ExpertsSpec | None = None  # of a target
    gemma: GemmaSpec | None = None  # Gemma 4; num_kv_heads, head_dim and rope are the first layer's then

    def window_of(self, layer: int) -> int | None:
        """How many positions a token sees in that layer, its own counted, the last ones; None: all before it."""
        return self.layer_windows[layer] if self.layer_windows else None

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """None where that layer has an MLP."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def shape_of(self, layer: int) -> LayerShape:
        """The attention of that layer."""
        return self.gemma.layers[layer] if self.gemma else LayerShape(self.num_kv_heads, self.head_dim, self.rope)

    def score_scale_of(self, layer: int) -> float:
        """What products of queries and keys are multiplied by."""
        return 1.0 if self.gemma else self.shape_of(layer).head_dim ** -0.5

    @property
    def logit_softcap(self) -> float | None:
        return self.gemma.logit_softcap if self.gemma else None


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a request that says nothing gets, from generation_config.json (do_sample false: temperature 0)."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A target checkpoint."""

    family: Family
    decoder: DecoderSpec
    is_head_tied: bool  # lm_head is embed_tokens
    eos_token_ids: tuple[int, ...]  # every one of generation_config.json and config.json
    bos_token_id: int | None = None
    generation_defaults: GenerationDefaults = GenerationDefaults()
