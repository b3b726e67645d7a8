"""The draft vocabulary: the ids that the target itself writes most."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recipe.answer import Answer


def most_written_ids(answers: Sequence[Answer], vocab_size: int, count: int) -> torch.Tensor:
    """[C] ascending ids. Of ids written equally often the lower ones are taken: byte-pair ids are ordered by
    frequency."""
    written = torch.cat([answer.ids[answer.num_prompt_tokens :].long() for answer in answers])
    order = torch.bincount(written, minlength=vocab_size).argsort(descending=True, stable=True)
    return order[:count].sort().values


def column_of_id(draft_vocab: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[V]: the column of an id in logits over the draft vocabulary, -1 where it has none."""
    columns = torch.full((vocab_size,), -1, device=draft_vocab.device)
    columns[draft_vocab] = torch.arange(len(draft_vocab), device=draft_vocab.device)
    return columns
