"""What is kept of one answer, and its place on disk.

The target's logits at a position are `hidden @ head.T`; only the hidden state is stored, with the log-sum-exp over all
ids, so that the loss needs no more than the rows of the head that are in the draft vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_PER_POSITION = ("ids", "taps", "hidden", "log_sum_exp")


@dataclass(frozen=True)
class Answer:
    """Prompt and answer, P positions of them, without the end-of-sequence token."""

    ids: torch.Tensor  # [P] int32
    taps: torch.Tensor  # [P, taps * D] bfloat16: raw outputs of the tapped layers
    hidden: torch.Tensor  # [P, D] float32: after the target's final norm
    log_sum_exp: torch.Tensor  # [P] float32: of the logits over all ids
    num_prompt_tokens: int

    def anchors(self, num_slots: int) -> range:
        """Positions whose block of `num_slots` slots lies in the answer, and whose successors are all known.

        The first anchor is the answer's first token, as in decoding: the anchor itself has no taps yet.
        """
        return range(self.num_prompt_tokens, len(self.ids) - num_slots)


def save_answers(answers: Sequence[Answer], path: Path) -> None:
    """Write a shard, of no answer at all as well; nothing half-written stays."""
    tensors = {name: torch.cat([getattr(answer, name) for answer in answers]) for name in _PER_POSITION if answers}
    tensors["num_positions"] = torch.tensor([len(answer.ids) for answer in answers])
    tensors["num_prompt_tokens"] = torch.tensor([answer.num_prompt_tokens for answer in answers])
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary)
    os.replace(temporary, path)


def load_answers(path: Path) -> list[Answer]:
    tensors = load_file(path)
    extents = tensors["num_positions"].tolist()
    if not extents:
        return []
    columns = [tensors[name].split(extents) for name in _PER_POSITION]
    prompts = tensors["num_prompt_tokens"].tolist()
    return [Answer(*values, num_prompt_tokens=prompt) for *values, prompt in zip(*columns, prompts, strict=True)]


def load_new_shards(folder: Path, already_read: set[Path]) -> Iterable[Answer]:
    """The answers of the shards of `folder` that are not in `already_read`, which is extended."""
    for path in sorted(folder.glob("answers-*.safetensors")):
        if path not in already_read:
            already_read.add(path)
            yield from load_answers(path)
