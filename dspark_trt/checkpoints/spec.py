"""What a checkpoint is, once it has been read: frozen specifications and a way to reach its tensors.

Readers of every supported format (Hugging Face safetensors, GGUF, DeepSpec) end here, so that graph emitters and the
PyTorch reference know one form only.

Canonical tensor names (no `model.` prefix, Hugging Face layout: Linear weights are [out, in]):
    target   embed_tokens.weight, layers.{i}.input_layernorm.weight, layers.{i}.post_attention_layernorm.weight,
             layers.{i}.self_attn.{q,k,v,o}_proj.{weight,bias}, layers.{i}.self_attn.{q,k}_norm.weight,
             layers.{i}.mlp.{gate,up,down}_proj.{weight,bias}, norm.weight, lm_head.weight (absent when tied);
             Gemma 4 also layers.{i}.{pre,post}_feedforward_layernorm.weight and layers.{i}.layer_scalar [1];
             where a layer has experts: layers.{i}.mlp.gate.weight [E, D], layers.{i}.mlp.experts.gate_up.weight
             [E, 2I, D] with the rows of gate and up in turn, layers.{i}.mlp.experts.down.weight [E, D, I],
             layers.{i}.mlp.shared_expert.{gate,up,down}_proj.weight, layers.{i}.mlp.shared_expert_gate.weight [1, D]
    drafter  the same for its layers, plus fc.weight, hidden_norm.weight, markov_head.markov_w1.weight [V, r],
             markov_head.markov_w2.weight [V, r], markov_head.gate_proj.{weight,bias} (gated),
             markov_head.joint_proj.{weight,bias} (rnn), confidence_head.proj.{weight,bias},
             layers.{i}.self_attn.attention_sink_bias [N] where a layer has a sink;
             embed_tokens.weight and lm_head.weight only where they are the drafter's own; of a language model the
             names of a target; of Medusa heads.{i}.blocks.{j}.{weight,bias} and heads.{i}.lm_head.weight
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

MarkovHeadType = Literal["vanilla", "gated", "rnn"]
RopeType = Literal["default", "linear", "llama3", "yarn", "proportional"]
Family = Literal[  # of targets: `model_type`
    "llama", "qwen2", "qwen3", "mistral", "ministral", "phi3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma4"
]
# token: the one at the position; next: the one behind it, which is known too once the position is committed
IngestedIds = Literal["none", "token", "next"]


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


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """What the queries of a draft block see in one layer: the context before the anchor, and the block."""

    is_causal: bool = False  # inside the block; otherwise every slot sees all slots
    window: int | None = None  # how far back; None: the whole context
    window_from: Literal["slot", "anchor"] = "slot"  # slot: `window` positions, its own counted; anchor: of the context
    has_sink: bool = False  # each head has one more logit in its softmax, which no position stands for


PLAIN_ATTENTION = BlockAttention()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterBase:
    """What every drafter that is a model says, whatever its family. A family adds `kind` and what only it has.

    Whoever does not make a family's graphs reads nothing else (see docs/architecture.md).
    """

    decoder: DecoderSpec  # its own layers; same vocabulary as the target's, and hidden size where it reads taps
    gamma: int
    target_layer_ids: tuple[int, ...]  # strictly increasing; i = output of decoder layer i, -1 = embedding output
    has_own_embedding: bool  # in the file and different from the target's
    has_own_head: bool
    num_target_layers: int | None = (
        None  # layers of the target that it was trained for, where its configuration says so
    )
    is_last_tap_normed: bool = True  # a tap of the target's last layer is what its final norm makes of it
    draft_vocab_size: int | None = None  # rows of its head, and of W2 (None: of the whole vocabulary)

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def num_draft_ids(self) -> int:
        """Target ids that can be proposed."""
        return self.draft_vocab_size or self.decoder.vocab_size

    @property
    def block_length(self) -> int:
        """Positions that a call for gamma drafts writes behind the context, at most."""
        return self.gamma

    @property
    def ingested_ids(self) -> IngestedIds:
        """Which token an ingested position needs besides its taps."""
        return "none"

    @property
    def row_state_width(self) -> int:
        """Numbers that the engine keeps of each row's last ingested position, besides K/V."""
        return 0

    @property
    def is_sequential(self) -> bool:
        """Whether a slot's K/V are written before the next slot is drafted: gamma runs of the layers in one call."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDrafterSpec(DrafterBase):
    """A DSpark drafter checkpoint (paper section 3.1), or a DFlash one where `markov_rank` is 0.

    The block is anchor first: the anchor's position predicts the first draft. Or it is mask first: the anchor's
    position predicts nothing, and gamma masks behind it do.
    """

    kind: Literal["block"] = "block"
    mask_token_id: int
    markov_rank: int  # 0: no head
    markov_head_type: MarkovHeadType
    has_confidence_head: bool
    has_confidence_bias: bool
    is_confidence_with_markov: bool
    is_mask_first: bool = False
    block_attention: tuple[BlockAttention, ...] = ()  # of each layer; empty: PLAIN_ATTENTION in all

    @property
    def block_length(self) -> int:
        """Positions of a block of gamma drafts."""
        return self.gamma + self.is_mask_first

    def attention_of(self, layer: int) -> BlockAttention:
        return self.block_attention[layer] if self.block_attention else PLAIN_ATTENTION

    @property
    def is_plain_attention(self) -> bool:
        """Whether every layer sees the whole context and the whole block."""
        return all(each == PLAIN_ATTENTION for each in self.block_attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec(DrafterBase):
    """An EAGLE-3 drafter: one decoder layer that drafts a token after the other (arXiv 2503.01840).

    The feature of position t is `fc` of its taps; the layer reads it together with the embedding of the token at t + 1.
    Behind the last position the drafter's own output takes the place of the feature; with masks (DART), one vector that
    was trained for it takes the place of feature and embedding, and all drafts come from one pass.
    """

    kind: Literal["eagle3"] = "eagle3"
    is_residual_normed: bool = False  # norm_before_residual: the residual stream starts behind hidden_norm
    is_output_normed: bool = False  # norm_output: the next step is fed what the final norm makes of this one's output
    tap_norm: Literal["none", "each", "joint"] = "none"  # of the taps before fc: fc_norm, norm_before_fc
    is_masked: bool = False  # DART: behind the first slot stand masks, and no draft is read; the head's norm acts twice

    @property
    def ingested_ids(self) -> IngestedIds:
        return "next"

    @property
    def row_state_width(self) -> int:
        """The feature of the last ingested position, from which the first draft is made."""
        return self.decoder.hidden_size

    @property
    def is_sequential(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelSpec(DrafterBase):
    """A language model of the target's vocabulary, which reads its tokens and nothing else of it.

    It drafts one token after the other. With a mask token (PARD, arXiv 2504.18583) all drafts come from one pass over
    the anchor and masks behind it, each of which predicts the token behind its place. A model of fewer ids than the
    target proposes these alone, and reads any other id as its last one; of a model of more ids, these are left out.
    """

    kind: Literal["language_model"] = "language_model"
    is_head_tied: bool  # its head is its own embedding
    mask_token_id: int | None = None

    @property
    def ingested_ids(self) -> IngestedIds:
        return "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec(DrafterBase):
    """Medusa heads on the target's last hidden state, one for each draft, as a chain (arXiv 2401.10774).

    A head is residual blocks, x + SiLU(linear(x)), and a matrix of its own onto the vocabulary, unless all share one.
    There is no decoder layer, and nothing is remembered of a row but the state of its last position.
    """

    kind: Literal["medusa"] = "medusa"
    num_blocks: int  # of a head
    has_block_bias: bool
    is_head_shared: bool

    @property
    def row_state_width(self) -> int:
        """The state of the last ingested position."""
        return self.decoder.hidden_size


DrafterSpec = BlockDrafterSpec | Eagle3Spec | LanguageModelSpec | MedusaSpec  # told apart by `kind`
FAMILY_NAMES: dict[str, str] = {
    "block": "block drafter",
    "eagle3": "EAGLE-3 drafter",
    "language_model": "draft language model",
    "medusa": "Medusa drafter",
}


def a_drafter(kind: str) -> str:
    """The family of that kind with its article."""
    name = FAMILY_NAMES[kind]
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


@dataclass(frozen=True, slots=True)
class NgramSpec:
    """No checkpoint: drafts are copied from each request's own text (prompt lookup, n-gram drafts).

    lookahead: they are also taken from what the target predicted behind drafts that it rejected.
    """

    gamma: int  # drafts of a step at most
    kind: Literal["ngram", "lookahead"] = "ngram"

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return ()

    @property
    def num_taps(self) -> int:
        return 0


SOURCES_OF_COPIES: dict[str, str] = {  # by `kind`
    "ngram": "copied from each request's own text",
    "lookahead": "from each request's own text and from what the target said of rejected drafts",
}
DraftSource = DrafterSpec | NgramSpec  # what drafts: the content of checkpoints/drafter.json


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `file` and `offset` are set when its bytes stand contiguously in a file on disk."""

    dtype: str  # numpy or ml_dtypes name: float32, float16, bfloat16
    shape: tuple[int, ...]
    file: Path | None = None  # as named; may be a symlink of a hub cache
    offset: int | None = None  # bytes from the start of the file


class WeightStore(Protocol):
    """Tensors of one checkpoint under canonical names, read lazily."""

    def names(self) -> tuple[str, ...]:
        """All canonical names, sorted."""
        ...

    def info(self, name: str) -> TensorInfo: ...

    def array(self, name: str) -> NDArray[np.generic]:
        """The tensor in its stored element type (GGUF: de-quantised to float32), memory-mapped where possible."""
        ...


@dataclass(frozen=True, slots=True)
class TargetCheckpoint:
    spec: TargetSpec
    weights: WeightStore


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    spec: DrafterSpec
    weights: WeightStore
    draft_ids: NDArray[np.int64] | None = None  # [W] target ids of the rows of head and W2, ascending; None: all
