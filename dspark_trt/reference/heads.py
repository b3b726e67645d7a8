"""Markov and confidence heads in PyTorch, written on their own so that they and the plugin's reference check each
other.

Shape letters: `R` requests, `G` slots drafted (at most gamma), `V` draft vocabulary, `D` hidden, `r` Markov rank.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import BlockDrafterSpec
from dspark_trt.reference.weights import ReferenceWeights

Int64 = NDArray[np.int64]
_LARGEST_LOGIT = 1e30  # stands for infinity, so that draft probabilities are always defined


class ReferenceHeads:
    """The sequential stage of the drafter. Source: paper section 3.1, eq. 4-7."""

    def __init__(self, spec: BlockDrafterSpec, weights: ReferenceWeights, draft_ids: Int64 | None = None) -> None:
        """`draft_ids` [V]: target ids of the rows of W2 and of the base logits' columns; None: the same."""
        self._spec = spec
        self._weights = weights
        self._draft_ids = None if draft_ids is None else torch.from_numpy(draft_ids).to(weights.device)

    def draft(
        self,
        base_logits: torch.Tensor,  # [R, G, V]
        hidden: torch.Tensor,  # [R, G, D]
        anchor_ids: torch.Tensor,  # [R]
        temperatures: torch.Tensor,  # [R]
        uniforms: torch.Tensor,  # [R, G]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """draft_ids [R, G], draft_logits [R, G, V] and confidence_logits [R, G] (None without a confidence head)."""
        spec = self._spec
        draft_ids = anchor_ids.new_empty(base_logits.shape[:2])
        draft_logits = torch.empty_like(base_logits)
        confidence_logits = torch.empty_like(uniforms) if spec.has_confidence_head else None
        state = hidden.new_zeros(len(anchor_ids), spec.markov_rank)
        previous = anchor_ids
        for slot in range(base_logits.shape[1]):
            h = hidden[:, slot]
            logits = base_logits[:, slot]
            if spec.markov_rank:
                embedded = self._weights["markov_head.markov_w1.weight"][previous]
                if spec.markov_head_type == "rnn":
                    state, feature = self._recurrent(state, embedded, h)
                elif spec.markov_head_type == "gated":
                    feature = self._gate(embedded, h) * embedded
                else:
                    feature = embedded
                logits = logits + self._weights.linear("markov_head.markov_w2", feature)
            if confidence_logits is not None:
                features = torch.cat([h, embedded], dim=-1) if spec.is_confidence_with_markov else h
                confidence_logits[:, slot] = self._weights.linear("confidence_head.proj", features).squeeze(-1)
            logits = torch.nan_to_num(logits, nan=-_LARGEST_LOGIT, posinf=_LARGEST_LOGIT, neginf=-_LARGEST_LOGIT)
            draft_logits[:, slot] = logits.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
            previous = draw(draft_logits[:, slot], temperatures, uniforms[:, slot])
            if self._draft_ids is not None:
                previous = self._draft_ids[previous]
            draft_ids[:, slot] = previous
        return draft_ids, draft_logits, confidence_logits

    def _gate(self, embedded: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self._weights.linear("markov_head.gate_proj", torch.cat([h, embedded], dim=-1)).sigmoid()

    def _recurrent(
        self, state: torch.Tensor, embedded: torch.Tensor, h: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next state and the feature of the bias."""
        joint = self._weights.linear("markov_head.joint_proj", torch.cat([state, embedded, h], dim=-1))
        gate, candidate, out = joint.chunk(3, dim=-1)
        return torch.lerp(candidate.tanh(), state, gate.sigmoid()), out.tanh()


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Ids [R] drawn from softmax(logits / temperature), [R, V], by inverse CDF; the first argmax at temperature 0."""
    is_greedy = temperatures <= 0
    centred = logits.double() - logits.double().amax(dim=-1, keepdim=True)
    tempered = centred / torch.where(is_greedy, 1.0, temperatures.double())[:, None]
    cumulative = tempered.softmax(dim=-1).cumsum(dim=-1)
    points = uniforms.double()[:, None] * cumulative[:, -1:]  # the last partial sum is 1 up to rounding
    sampled = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
    return torch.where(is_greedy, logits.argmax(dim=-1), sampled)
