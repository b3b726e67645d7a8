"""Which logits of a block are edited, by the tokens of a request and its drafts: processors 1 to 5 of `sampling`, for
all slots at once.

Shape letter: `E` edits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.drafting import NO_TOKEN
from dspark_trt.runtime.sampling import LogitProcessors


@dataclass(frozen=True, slots=True)
class TokenEdits:
    """Edits of one block, or of several one behind the other. What drafts add to the counts is not in them."""

    ids: NDArray[np.int64]  # [E], none twice in a block
    masks: NDArray[np.int64]  # [E] bit s: must not come in slot s
    is_seen: NDArray[np.int64]  # [E] 1: repetition_penalty takes it
    counts: NDArray[np.float32]  # [E] among the generated tokens
    bias: NDArray[np.float32]  # [E]

    @classmethod
    def concat(cls, parts: Sequence[TokenEdits]) -> TokenEdits:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            ints, floats = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
            return cls(ints, ints, ints, floats, floats)
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.masks for part in parts]),
            np.concatenate([part.is_seen for part in parts]),
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.bias for part in parts]),
        )


def token_edits(processors: LogitProcessors, draft_ids: Sequence[int]) -> TokenEdits:
    """The edits of slots 0 .. len(draft_ids); `draft_ids` come after the tokens that were pushed."""
    params, num_slots = processors.params, len(draft_ids) + 1
    seen_ids, seen_counts = processors.seen
    masked: dict[int, int] = {}
    tokens = processors.tokens
    for sequence in params.bad_words:
        beginning = list(sequence[:-1])
        length = len(beginning)
        text = [NO_TOKEN] * (length - len(tokens)) + tokens[max(len(tokens) - length, 0) :] + list(draft_ids)
        for slot in range(num_slots):
            if text[slot : slot + length] == beginning:
                masked[sequence[-1]] = masked.get(sequence[-1], 0) | 1 << slot
    num_kept_open = min(max(params.min_tokens - processors.num_generated, 0), num_slots)
    if num_kept_open:
        for token_id in processors.ending_ids:
            masked[token_id] = masked.get(token_id, 0) | (1 << num_kept_open) - 1
    drafted = draft_ids if processors.has_penalties else ()
    place = processors.place_of_seen
    others: dict[int, int] = {}
    for token_id in (*params.logit_bias, *masked, *drafted):
        if token_id not in place:
            others.setdefault(token_id, len(seen_ids) + len(others))
    ids = np.concatenate((seen_ids, np.array(list(others), dtype=np.int64)))
    edits = TokenEdits(
        ids=ids,
        masks=np.zeros(len(ids), dtype=np.int64),
        is_seen=(np.arange(len(ids)) < len(seen_ids)).astype(np.int64),
        counts=np.concatenate((seen_counts, np.zeros(len(others), dtype=np.float32))),
        bias=np.zeros(len(ids), dtype=np.float32),
    )
    for token_id, bits in masked.items():
        edits.masks[others[token_id] if token_id in others else place[token_id]] = bits
    for token_id, bias in params.logit_bias.items():
        edits.bias[others[token_id] if token_id in others else place[token_id]] = bias
    return edits
