"""How likely copied drafts survive: the measured curve, corrected by what became of this request's lookups and of all.

Shape letters: `R` requests with a lookup, `G` gamma. Source: DESIGN section 7 (corrections are slow, bounded, and from
data at least two steps old).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.lookup import MAX_MATCH, LookupAcceptance
from dspark_trt.runtime.corrections import Lagged
from dspark_trt.runtime.lookup import Lookup

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COMMON_RATE = 0.02  # of the difference between seen and expected acceptance, in logits
OWN_RATE = 0.25  # the same for one request: some texts repeat themselves and some do not
MAX_SHIFT = 2.0  # logits, of either


@dataclass(frozen=True, slots=True)
class LookupOffer:
    """The lookups of one step."""

    rows: Ints  # [R] KV rows
    generations: Ints  # [R] of their occupants
    is_greedy: NDArray[np.bool_]  # [R]
    match_lens: Ints  # [R, n] of each draft, n being the most of any

    @classmethod
    def of(
        cls, lookups: Sequence[Lookup], rows: Sequence[int], generations: Sequence[int], is_greedy: Sequence[bool]
    ) -> LookupOffer:
        return cls(
            np.array(rows, dtype=np.int64),
            np.array(generations, dtype=np.int64),
            np.array(is_greedy, dtype=np.bool_),
            _padded([lookup.match_lens for lookup in lookups]),
        )

    def chosen(self, lines: list[int]) -> LookupOffer:
        """Some of them, in this order."""
        return LookupOffer(self.rows[lines], self.generations[lines], self.is_greedy[lines], self.match_lens[lines])


class LookupSurvival:
    """P(draft j is accepted given those before it), for drafts that were looked up."""

    def __init__(self, acceptance: LookupAcceptance, *, num_rows: int, gamma: int, corrects: bool) -> None:
        curves = acceptance.curves
        self._measured = np.log(curves / (1 - curves))  # [greedy, sampled] x match length
        self._logits = self._measured.copy()
        self._slots = np.arange(gamma)
        self._corrects = corrects
        self._own = np.zeros(num_rows)
        self._generation = np.full(num_rows, -1, dtype=np.int64)
        self._lagged: Lagged[tuple[LookupOffer, Floats, Ints, Ints]] = Lagged(self._move)

    def confidence(self, offer: LookupOffer) -> Floats:
        """[R, G]"""
        is_known = self._generation[offer.rows] == offer.generations
        own = np.where(is_known, self._own[offer.rows], 0.0)
        logits = self._logits[np.where(offer.is_greedy, 0, 1)[:, None], self._lengths(offer)] + own[:, None]
        confidence: Floats = 1.0 / (1.0 + np.exp(-logits))
        return confidence

    def observe(self, offer: LookupOffer, confidence: Floats, verify_lens: Ints, num_accepted: Ints) -> None:
        """What became of the drafts that were verified. confidence [R, G], the others [R]."""
        if self._corrects and verify_lens.any():
            self._lagged.add((offer, confidence, verify_lens, num_accepted))

    def advance(self) -> None:
        """A step begins: what was seen two steps ago counts from now on."""
        self._lagged.advance()

    def move_row(self, source: int, destination: int) -> None:
        self._own[destination] = self._own[source]
        self._generation[destination] = self._generation[source]

    def _lengths(self, offer: LookupOffer) -> Ints:
        """Index of the curve for every slot; any, where there is no draft. [R, G]"""
        columns = np.minimum(self._slots, offer.match_lens.shape[1] - 1)
        lengths: Ints = np.minimum(offer.match_lens[:, columns], MAX_MATCH) - 1
        return lengths

    def _move(self, seen: tuple[LookupOffer, Floats, Ints, Ints]) -> None:
        offer, confidence, verify_lens, num_accepted = seen
        is_seen = (self._slots < verify_lens[:, None]) & (self._slots <= num_accepted[:, None])
        surprise = np.where(is_seen, (self._slots < num_accepted[:, None]) - confidence, 0.0)
        regimes = np.broadcast_to(np.where(offer.is_greedy, 0, 1)[:, None], surprise.shape)
        np.add.at(self._logits, (regimes, self._lengths(offer)), COMMON_RATE * surprise)
        np.clip(self._logits, self._measured - MAX_SHIFT, self._measured + MAX_SHIFT, out=self._logits)
        is_known = self._generation[offer.rows] == offer.generations
        own = np.where(is_known, self._own[offer.rows], 0.0) + OWN_RATE * surprise.sum(axis=1)
        self._own[offer.rows] = np.clip(own, -MAX_SHIFT, MAX_SHIFT)
        self._generation[offer.rows] = offer.generations


def _padded(match_lens: Sequence[Sequence[int]]) -> Ints:
    """[R, n]; a shorter line goes on with its last number."""
    width = max(map(len, match_lens))
    return np.array([[*line, *[line[-1]] * (width - len(line))] for line in match_lens], dtype=np.int64)
