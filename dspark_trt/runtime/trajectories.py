"""Lookahead decoding in one chain of tokens: drafts from the request's text and from what the target said of drafts
that failed.

Every step verifies a chain, the anchor and its drafts, and the target predicts a token behind each place of it. Behind
the first rejection these predictions are thrown away by others; here they are the Jacobi trajectory. A prediction joins
a pool under the drafts that it followed (n-grams), and is the next guess for its own position (Jacobi iteration).
Lookahead's two-dimensional window beside the chain is left out: see docs/adr/0015.

A draft is what followed the longest run of latest tokens, drafts included, in the text or in the pool; where no run is
known, the guess for its position. All of it is a function of the past, so a draft's p_d is a point mass.

Source: Lookahead decoding (arXiv 2402.02057), with its pool filled from the prompt too; Jacobi decoding (arXiv
2305.10427).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dspark_trt.runtime.lookup import FILED_LENGTHS, Lookup, TokenIndex

POOLED_LENGTHS = (1, 2)  # tokens of a run in the pool: longer ones hold a rejected draft and hardly come again
MAX_POOLED_RUNS = 2048  # of a request; the oldest go first
GUESS_MATCH_LEN = 1  # a guess is as likely as a match of so many tokens, since a curve has nothing below it


class TrajectoryIndex(TokenIndex):
    """The runs of one request's text, and what the target predicted behind drafts that it rejected."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        super().__init__(token_ids)
        self._pool: dict[tuple[int, ...], int] = {}  # run -> the token predicted behind it, oldest first
        self._guesses: list[int] = []  # for the positions behind the anchor

    def append(self, token_id: int) -> None:
        super().append(token_id)
        self._guesses = []  # they were for other positions

    def look_up(self, num_drafts: int) -> Lookup | None:
        """Up to num_drafts drafts, until nothing is known. None: nothing is known behind the anchor."""
        self._file()
        recent = self._tokens[-FILED_LENGTHS[-1] :]
        drafts: list[int] = []
        match_lens: list[int] = []
        while len(drafts) < num_drafts:
            found = self._followed(recent) or self._guess(len(drafts))
            if found is None:
                break
            token_id, match_len = found
            drafts.append(token_id)
            match_lens.append(match_len)
            recent.append(token_id)
        return Lookup(tuple(drafts), match_lens[0], tuple(match_lens)) if drafts else None

    def harvest(self, draft_ids: Sequence[int], num_accepted: int, predicted_ids: Sequence[int]) -> None:
        """Keep what the target predicted behind the rejected drafts, `draft_ids[num_accepted:]`.

        To be called when the step's tokens have been appended: predicted_ids[0] is a guess for the position behind the
        anchor that they end in.
        """
        num_emitted = num_accepted + 1
        chain = [*self._tokens[: len(self._tokens) - num_emitted][-max(POOLED_LENGTHS) :], *draft_ids]
        behind = len(chain) - len(draft_ids)
        for place, predicted in enumerate(predicted_ids, start=behind + num_accepted + 1):
            for length in POOLED_LENGTHS:
                if place >= length:
                    run = tuple(chain[place - length : place])
                    self._pool.pop(run, None)
                    self._pool[run] = predicted
        while len(self._pool) > MAX_POOLED_RUNS:
            del self._pool[next(iter(self._pool))]
        self._guesses = list(predicted_ids)

    def _followed(self, recent: Sequence[int]) -> tuple[int, int] | None:
        """What followed the longest run of the latest tokens, and its length; the pool goes before the text."""
        for length in reversed(FILED_LENGTHS):
            if length > len(recent):
                continue
            run = tuple(recent[-length:])
            if (predicted := self._pool.get(run)) is not None:
                return predicted, length
            if (at := self._followed_at.get(run)) is not None:
                return self._tokens[at], length
        return None

    def _guess(self, slot: int) -> tuple[int, int] | None:
        return (self._guesses[slot], GUESS_MATCH_LEN) if slot < len(self._guesses) else None
