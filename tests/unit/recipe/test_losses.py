"""The losses of the drafter's training, against their definitions."""

from __future__ import annotations

import pytest
import torch
from recipe.losses import drafter_losses, label_cross_entropy, position_weights, total_variation


def distributions(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).softmax(dim=-1)


def test_total_variation_is_half_the_l1_distance_and_one_minus_the_common_mass() -> None:
    draft, target = distributions(0, 5, 11), distributions(1, 5, 11)
    distance = total_variation(draft, target)
    torch.testing.assert_close(distance, (draft - target).abs().sum(-1) / 2)
    torch.testing.assert_close(distance, 1 - torch.minimum(draft, target).sum(-1))


def test_what_the_target_gives_to_ids_outside_the_draft_vocabulary_counts_as_distance() -> None:
    target = distributions(1, 5, 11)
    draft = torch.cat([distributions(0, 5, 8), torch.zeros(5, 3)], dim=-1)
    torch.testing.assert_close(total_variation(draft[:, :8], target[:, :8]), total_variation(draft, target))


def test_position_weights_sum_to_one_and_fall_by_the_same_factor() -> None:
    weights = position_weights(7)
    assert weights.sum().item() == pytest.approx(1)
    torch.testing.assert_close(weights[1:] / weights[:-1], torch.full((6,), torch.e**-0.25))


def test_a_label_outside_the_draft_vocabulary_has_no_cross_entropy() -> None:
    logits = torch.randn(2, 3, 11, requires_grad=True)
    losses = label_cross_entropy(logits, torch.tensor([[4, -1, 0], [-1, -1, 10]]))
    assert losses.shape == (2, 3)
    assert (losses == 0).tolist() == [[False, True, False], [True, True, False]]
    losses.sum().backward()
    assert logits.grad is not None
    assert (logits.grad.abs().sum(-1) == 0).tolist() == [[False, True, False], [True, True, False]]


def test_the_total_is_the_papers_mixture_and_acceptance_the_common_mass() -> None:
    draft_logits, all_target_logits = torch.randn(4, 3, 8), torch.randn(4, 3, 11)
    labels, confidence_logits = torch.randint(8, (4, 3)), torch.randn(4, 3)
    losses = drafter_losses(
        draft_logits, all_target_logits[..., :8], all_target_logits.logsumexp(-1), labels, confidence_logits
    )
    target = all_target_logits.softmax(-1)[..., :8]
    acceptance = torch.minimum(draft_logits.softmax(-1), target).sum(-1)
    torch.testing.assert_close(losses.acceptance, acceptance)
    weights = position_weights(3)
    per_slot = (
        -0.1 * draft_logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        + 0.9 * (1 - acceptance)
        - acceptance * confidence_logits.sigmoid().log()
        - (1 - acceptance) * (-confidence_logits).sigmoid().log()
    )
    torch.testing.assert_close(losses.total, (per_slot * weights).sum(-1).mean())


def test_gradients_reach_draft_and_confidence_logits_and_never_the_target() -> None:
    draft_logits = torch.randn(4, 3, 8, requires_grad=True)
    target_logits = torch.randn(4, 3, 8, requires_grad=True)
    confidence_logits = torch.randn(4, 3, requires_grad=True)
    losses = drafter_losses(
        draft_logits, target_logits, target_logits.detach().logsumexp(-1), torch.full((4, 3), -1), confidence_logits
    )
    losses.total.backward()
    assert draft_logits.grad is not None
    assert confidence_logits.grad is not None
    assert bool((draft_logits.grad.abs().sum(-1) > 0).all())
    assert bool((confidence_logits.grad != 0).all())
    assert target_logits.grad is None


def test_a_step_along_the_gradient_raises_acceptance() -> None:
    logits = torch.randn(16, 3, 8, requires_grad=True)
    target_logits = torch.randn(16, 3, 8)
    labels, confidence_logits = torch.full((16, 3), -1), torch.zeros(16, 3)
    before = drafter_losses(logits, target_logits, target_logits.logsumexp(-1), labels, confidence_logits)
    before.total_variation.backward()
    assert logits.grad is not None
    after = drafter_losses(
        logits.detach() - 5 * logits.grad, target_logits, target_logits.logsumexp(-1), labels, confidence_logits
    )
    assert after.acceptance.mean() > before.acceptance.mean()
