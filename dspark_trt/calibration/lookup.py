"""Measures how often drafts copied from a text are accepted: looks up every token of recorded answers.

No engine is asked again: a draft is accepted where the answer goes on with it. For answers that were sampled this is a
draw from p_t, so its mean is the acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.lookup import MAX_MATCH, UNMEASURED_LOOKUP, LookupAcceptance
from dspark_trt.runtime.lookup import TokenIndex
from dspark_trt.steptable.table import isotonic

PRIOR_WEIGHT = 20.0  # lookups that the unmeasured curve counts for, at every length


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what was generated behind it."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    is_greedy: bool


def fit_lookup(answers: Iterable[Answer]) -> LookupAcceptance:
    """The share of accepted first drafts by match length, for greedy and for sampled answers; never falls with the
    length. Near `UNMEASURED_LOOKUP` where little was seen."""
    accepted, seen = count_lookups(answers)
    prior = UNMEASURED_LOOKUP.curves
    curves = (accepted + PRIOR_WEIGHT * prior) / (seen + PRIOR_WEIGHT)
    greedy, sampled = (tuple(isotonic(curve.tolist())) for curve in curves)
    return LookupAcceptance(greedy=greedy, sampled=sampled)


def count_lookups(answers: Iterable[Answer]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Accepted first drafts and lookups that found something, each [greedy, sampled] x [match length]."""
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
