"""Measures how often drafts without a model are accepted, by the length of the match before them.

Drafts copied from a text: every token of recorded answers is looked up. No engine is asked again: a draft is accepted
where the answer goes on with it. For answers that were sampled this is a draw from p_t, so its mean is the acceptance.
Drafts of trajectories depend on what was verified before, so they are counted while a loop verifies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.lookup import MAX_MATCH, UNMEASURED_LOOKUP, LookupAcceptance
from dspark_trt.runtime.arrays import take_rows, to_host
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.lookup import TokenIndex
from dspark_trt.runtime.sampling import is_greedy, target_probs
from dspark_trt.runtime.verification import Segment
from dspark_trt.steptable.table import isotonic

PRIOR_WEIGHT = 20.0  # lookups that the unmeasured curve counts for, at every length


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what was generated behind it."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    is_greedy: bool


Counts = tuple[NDArray[np.float64], NDArray[np.float64]]  # accepted and seen: [greedy, sampled] x [match length]


@dataclass(slots=True)
class TrajectoryCounts:
    """Hand `on_verified` to a loop that keeps trajectories and verifies every draft."""

    accepted: NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, MAX_MATCH)))
    seen: NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, MAX_MATCH)))

    def on_verified(self, segments: Sequence[Segment], logits: Any, block: DraftBlock | None) -> None:
        """A draft counts by the probability that those before it are accepted, and is accepted by its own."""
        for segment in segments:
            state, drafts, first = segment.state, segment.draft_ids, segment.first_logit
            if not drafts or first is None or state.lookup is None or state.processors.has_edits:
                continue
            rows = take_rows(logits, np.arange(first, first + len(drafts)))
            probs = to_host(target_probs(rows, [state.params] * len(drafts)))[np.arange(len(drafts)), drafts]
            reached = np.cumprod([1.0, *probs[:-1]])
            regime = 0 if is_greedy(state.params.temperature) else 1
            lengths = np.minimum(state.lookup.match_lens[: len(drafts)], MAX_MATCH) - 1
            np.add.at(self.seen[regime], lengths, reached)
            np.add.at(self.accepted[regime], lengths, reached * probs)


def fit_lookup(counts: Counts) -> LookupAcceptance:
    """The share of accepted drafts by match length, for greedy and for sampled answers; never falls with the
    length. Near `UNMEASURED_LOOKUP` where little was seen."""
    accepted, seen = counts
    prior = UNMEASURED_LOOKUP.curves
    curves = (accepted + PRIOR_WEIGHT * prior) / (seen + PRIOR_WEIGHT)
    greedy, sampled = (tuple(isotonic(curve.tolist())) for curve in curves)
    return LookupAcceptance(greedy=greedy, sampled=sampled)


def count_lookups(answers: Iterable[Answer]) -> Counts:
    """Accepted first drafts and lookups that found something."""
    accepted, seen = np.zeros((2, MAX_MATCH)), np.zeros((2, MAX_MATCH))
    for answer in answers:
        _count(answer, accepted[0 if answer.is_greedy else 1], seen[0 if answer.is_greedy else 1])
    return accepted, seen


def _count(answer: Answer, accepted: NDArray[np.float64], seen: NDArray[np.float64]) -> None:
    index = TokenIndex(answer.prompt_ids)
    for token_id in answer.token_ids:
        found = index.look_up(1)
        if found is not None:
            seen[found.match_len - 1] += 1
            accepted[found.match_len - 1] += found.draft_ids[0] == token_id
        index.append(token_id)
