"""What drafts: one specification for each family of drafters, and what all of them say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dspark_trt.checkpoints.spec.decoder import DecoderSpec

MarkovHeadType = Literal["vanilla", "gated", "rnn"]
# token: the one at the position; next: the one behind it, which is known too once the position is committed
IngestedIds = Literal["none", "token", "next"]


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
    is_module: bool = False  # MTP: the tap is the feature; a matrix joins it to the embedding for a plain layer
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
