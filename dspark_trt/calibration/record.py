"""Runs prompts at full length and keeps, for every slot of every block, what was said of it and what became of it.

Shape letters: `N` blocks, `G` gamma, `V` vocabulary. Source: paper section 3.2.1.

The label of a slot is min(1, p_t / p_d) of its draft, given the drafts before it: the probability that acceptance keeps
it, which varies less than whether it was kept. It is known behind a rejection, too, since the whole block was verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.calibration.lookup import Answer
from dspark_trt.runtime.arrays import take_rows, to_host
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.sampling import is_greedy, target_probs
from dspark_trt.runtime.verification import Segment


@dataclass(frozen=True, slots=True)
class Recording:
    """Blocks whose every slot was verified."""

    confidence_logits: NDArray[np.float32]  # [N, G]
    acceptance: NDArray[np.float64]  # [N, G] P(draft j is accepted given those before it)
    draft_ids: NDArray[np.int64]  # [N, G]
    is_greedy: NDArray[np.bool_]  # [N]
    groups: NDArray[np.int64]  # [N] index of the prompt
    target_ids: NDArray[np.int64]  # [N] the target's most probable token in the first slot

    def __len__(self) -> int:
        return len(self.confidence_logits)

    def chosen(self, rows: NDArray[np.bool_]) -> Recording:
        """Some of the blocks."""
        return Recording(
            self.confidence_logits[rows],
            self.acceptance[rows],
            self.draft_ids[rows],
            self.is_greedy[rows],
            self.groups[rows],
            self.target_ids[rows],
        )


@dataclass(slots=True)
class Recorder:
    """Hand `on_verified` to a loop of mode `fixed` that verifies gamma drafts."""

    group_of: Callable[[str], int]  # prompt index of a request id
    rows: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any], bool, int, int]] = field(default_factory=list)
    numbered_answers: list[tuple[int, Answer]] = field(default_factory=list)  # with the prompt; finished or not
    unfinished: set[int] = field(default_factory=set)  # prompts whose answers were cut off by the end of the time

    @property
    def answers(self) -> list[Answer]:
        """What was generated."""
        return [answer for _, answer in self.numbered_answers]

    def on_verified(self, segments: Sequence[Segment], logits: Any, block: DraftBlock | None) -> None:
        """Labels of every block that was verified whole."""
        for segment in segments:
            state, gamma = segment.state, 0 if block is None else block.draft_ids.shape[1]
            if block is None or segment.first_logit is None or len(segment.draft_ids) < gamma:
                continue
            if state.processors.has_edits:  # edits follow accepted tokens; a recording has none
                continue
            first, row = segment.first_logit, segment.block_row
            drafts = np.array(segment.draft_ids)
            probs = to_host(target_probs(take_rows(logits, np.arange(first, first + gamma)), [state.params] * gamma))
            p_t = probs[np.arange(gamma), drafts]
            p_d = np.ones(gamma)
            if not is_greedy(state.params.temperature):
                for slot in range(gamma):
                    of_slot = block.draft_probs(slot, [row])
                    p_d[slot] = float(to_host(block.prob_of_drafts(slot, [row], of_slot))[0])
            with np.errstate(divide="ignore", invalid="ignore"):
                acceptance = np.where(p_d > 0, np.minimum(1.0, p_t / p_d), 0.0)
            group = self.group_of(state.request.request_id)
            greedy = is_greedy(state.params.temperature)
            written = int(probs[0].argmax())
            self.rows.append((block.confidence_logits[row].copy(), acceptance, drafts, greedy, group, written))

    def recording(self, gamma: int) -> Recording:
        """Everything so far."""
        columns = zip(*self.rows, strict=True) if self.rows else ([],) * 6
        logits, acceptance, drafts, greedy, groups, written = columns
        return Recording(
            np.array(logits, dtype=np.float32).reshape(-1, gamma),
            np.array(acceptance, dtype=np.float64).reshape(-1, gamma),
            np.array(drafts, dtype=np.int64).reshape(-1, gamma),
            np.array(greedy, dtype=np.bool_),
            np.array(groups, dtype=np.int64),
            np.array(written, dtype=np.int64),
        )
