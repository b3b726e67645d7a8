"""Answers -> batches: anchors are drawn, and every block gets its slots, labels, mask and target distribution.

Shape letters as in recipe/drafter.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from recipe.answer import Answer
from recipe.drafter import BlockInput


@dataclass(frozen=True)
class Batch:
    block: BlockInput
    previous_ids: torch.Tensor  # [B, A, n] int64: x_{j-1}, which the Markov and the confidence head see
    labels: torch.Tensor  # [B, A, n] int64: the answer's own next token
    target_hidden: torch.Tensor  # [B, A, n, D] float32: gives the target's logits for the label
    target_log_sum_exp: torch.Tensor  # [B, A, n] float32: of these logits, over all V ids

    def to(self, device: str) -> Batch:
        block = BlockInput(**{name: tensor.to(device) for name, tensor in vars(self.block).items()})
        rest = {name: tensor.to(device) for name, tensor in vars(self).items() if name != "block"}
        return Batch(block=block, **rest)


def draw_anchors(answer: Answer, num_blocks: int, num_slots: int, generator: torch.Generator) -> torch.Tensor:
    """[A] ascending positions; with repetition only where the answer has fewer than A."""
    possible = answer.anchors(num_slots)
    if len(possible) >= num_blocks:
        chosen = torch.randperm(len(possible), generator=generator)[:num_blocks]
    else:
        chosen = torch.randint(len(possible), (num_blocks,), generator=generator)
    return chosen.sort().values + possible.start


def make_batch(answers: Sequence[Answer], anchors: Sequence[torch.Tensor], num_slots: int, mask_id: int) -> Batch:
    """One batch of blocks of `num_slots` slots, from equally many anchors of each answer."""
    starts = torch.stack(list(anchors))
    ids = pad_sequence([answer.ids.long() for answer in answers], batch_first=True)
    hidden = pad_sequence([answer.hidden for answer in answers], batch_first=True)
    log_sum_exp = pad_sequence([answer.log_sum_exp for answer in answers], batch_first=True)
    positions = starts[..., None] + torch.arange(num_slots)  # [B, A, n]
    flat = positions.flatten(1)
    slot_ids = torch.full_like(positions, mask_id)
    slot_ids[..., 0] = ids.gather(1, starts)
    return Batch(
        block=BlockInput(
            slot_ids=slot_ids.flatten(1),
            slot_positions=flat,
            taps=pad_sequence([answer.taps for answer in answers], batch_first=True),
            is_visible=visibility(starts, num_slots, ids.shape[1]),
        ),
        previous_ids=ids.gather(1, flat).view_as(positions),
        labels=ids.gather(1, flat + 1).view_as(positions),
        target_hidden=hidden.gather(1, flat[..., None].expand(-1, -1, hidden.shape[-1])).unflatten(
            1, positions.shape[1:]
        ),
        target_log_sum_exp=log_sum_exp.gather(1, flat).view_as(positions),
    )


def visibility(starts: torch.Tensor, num_slots: int, num_positions: int) -> torch.Tensor:
    """Anchors [B, A] -> [B, 1, S, P + S]: a slot sees the context below its anchor, and its own block in both
    directions."""
    num_blocks = starts.shape[1]
    context = torch.arange(num_positions) < starts.repeat_interleave(num_slots, dim=1)[..., None]
    block = torch.arange(num_blocks).repeat_interleave(num_slots)
    own_block = (block[:, None] == block).expand(len(starts), -1, -1)
    return torch.cat([context, own_block], dim=-1)[:, None]


def groups_by_length(answers: Sequence[Answer], size: int, order: random.Random) -> Iterator[list[Answer]]:
    """One pass over the answers in groups of similar length, so that little is padding; a rest is left out."""
    shuffled = order.sample(list(answers), len(answers))
    for start in range(0, len(shuffled), 32 * size):
        near = sorted(shuffled[start : start + 32 * size], key=lambda answer: len(answer.ids))
        groups = [near[at : at + size] for at in range(0, len(near) - size + 1, size)]
        yield from order.sample(groups, len(groups))
