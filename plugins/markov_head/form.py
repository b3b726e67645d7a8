"""The form of a MarkovHead: everything about the operation that is fixed when a graph is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HeadType = Literal["vanilla", "gated", "rnn"]
FloatType = Literal["float32", "float16", "bfloat16"]

# Fixed inputs of the operation; the weights of `MarkovHeadForm.weight_names` follow them.
INPUT_NAMES = ("base_logits", "hidden", "anchor_ids", "temperatures", "uniforms")
W1 = "markov_head.markov_w1.weight"
W2 = "markov_head.markov_w2.weight"
# The magnitude that stands for a non-finite logit. Divided by a temperature of 1e-5 it is still a finite float32.
LARGEST_LOGIT = 1e30
# Stands for the -inf of a token that may not be drawn; below every other logit, so that its probability is exactly 0.
EXCLUDED_LOGIT = -3e38


@dataclass(frozen=True, slots=True)
class MarkovHeadForm:
    """Sequential stage of a DSpark drafter (paper section 3.1, eq. 4-7).

    `markov_rank` 0 means that there is no Markov head: drafts come from the base logits alone. `top_n` > 0 restricts
    every slot to its top_n largest base logits, equal ones by lowest id: it depends on the base logits alone, so
    draft_probs are known.
    """

    gamma: int
    vocab_size: int
    markov_rank: int
    head_type: HeadType = "vanilla"
    has_confidence_head: bool = True
    has_confidence_bias: bool = True
    is_confidence_with_markov: bool = True
    top_n: int = 0  # 0: the whole vocabulary
    hidden_size: int = 0  # read by the GPU kernels only
    weight_type: FloatType = "float32"  # of all weights and of `hidden`
    logits_type: FloatType = "float32"  # of `base_logits`

    def __post_init__(self) -> None:
        if not 0 <= self.top_n < self.vocab_size:
            raise ValueError(f"top_n: expected 0 (no restriction) to {self.vocab_size - 1}, found {self.top_n}")

    @property
    def has_markov_head(self) -> bool:
        return self.markov_rank > 0

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Canonical checkpoint names of the weights, in the order of the node's inputs."""
        names: list[str] = []
        if self.has_markov_head:
            names += [W1, W2]
            projection = {"vanilla": None, "gated": "gate_proj", "rnn": "joint_proj"}[self.head_type]
            if projection is not None:
                names += [f"markov_head.{projection}.weight", f"markov_head.{projection}.bias"]
        if self.has_confidence_head:
            names.append("confidence_head.proj.weight")
            if self.has_confidence_bias:
                names.append("confidence_head.proj.bias")
        return tuple(names)

    @property
    def input_names(self) -> tuple[str, ...]:
        return INPUT_NAMES + self.weight_names

    @property
    def output_names(self) -> tuple[str, ...]:
        outputs = ("draft_ids", "draft_logits")
        return (*outputs, "confidence_logits") if self.has_confidence_head else outputs
