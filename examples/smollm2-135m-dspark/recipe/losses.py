"""The losses of the paper: 0.1 cross-entropy + 0.9 total variation + cross-entropy of the confidence, weighted by
position.

Distributions are over the draft vocabulary of C ids. The target's are exact there, because its log-sum-exp over all V
ids is known; what it gives to other ids is probability that no draft can meet.

Shape letters: `n` slots of a block, the last dimension of everything per slot; `...` blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

_CROSS_ENTROPY_WEIGHT, _TOTAL_VARIATION_WEIGHT = 0.1, 0.9
_POSITION_DECAY = 4.0


@dataclass(frozen=True)
class Losses:
    """Scalars to minimise, and the acceptance that they lead to."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    confidence: torch.Tensor
    acceptance: torch.Tensor  # [..., n], no gradient: probability that a draft drawn for the slot is accepted


def position_weights(num_slots: int, decay: float = _POSITION_DECAY) -> torch.Tensor:
    """exp(-k / decay) for slot k = 0 ... n - 1, of sum 1: a later slot only counts when all before it were accepted."""
    weights = torch.exp(-torch.arange(num_slots) / decay)
    return weights / weights.sum()


def total_variation(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half the L1 distance of two distributions [..., C]; the target's missing mass lies where the draft has none."""
    outside = (1 - target.sum(dim=-1)).clamp(min=0)
    return 0.5 * ((draft - target).abs().sum(dim=-1) + outside)


def label_cross_entropy(draft_logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Draft logits [..., C], the label's column [...] or -1 outside the draft vocabulary, where the loss is 0."""
    losses = functional.cross_entropy(draft_logits.flatten(0, -2), columns.flatten(), ignore_index=-1, reduction="none")
    return losses.view(columns.shape)


def drafter_losses(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, target_log_sum_exp: torch.Tensor,
    label_columns: torch.Tensor, confidence_logits: torch.Tensor,
) -> Losses:  # fmt: skip
    """Logits [..., n, C], the others [..., n]. Only the draft and the confidence logits get gradients."""
    draft = draft_logits.float().softmax(dim=-1)
    with torch.no_grad():
        target = (target_logits.float() - target_log_sum_exp[..., None]).exp()
    distance = total_variation(draft, target)
    acceptance = (1 - distance.detach()).clamp(0, 1)  # sum of min(p_draft, p_target)
    confidence = functional.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance, reduction="none")
    weights = position_weights(draft.shape[-2]).to(draft.device)

    def weighted(losses: torch.Tensor) -> torch.Tensor:
        return (losses * weights).sum(dim=-1).mean()

    terms = (
        weighted(label_cross_entropy(draft_logits.float(), label_columns)),
        weighted(distance),
        weighted(confidence),
    )
    total = _CROSS_ENTROPY_WEIGHT * terms[0] + _TOTAL_VARIATION_WEIGHT * terms[1] + terms[2]
    return Losses(total, *terms, acceptance)
