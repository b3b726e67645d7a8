"""Drafts without a model: what followed the last time the request's latest tokens stood in its own text.

Source: prompt lookup decoding (n-gram drafts). Drafts are a function of committed tokens alone, so whatever decides
about them may know them; their p_d is a point mass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dspark_trt.contract.lookup import MAX_MATCH

FILED_LENGTHS = (1, 2, 4, 8)  # of the runs that are found at once; a match is then followed backwards


@dataclass(frozen=True, slots=True)
class Lookup:
    """Drafts of one request."""

    draft_ids: tuple[int, ...]
    match_len: int  # tokens that stood there as they stand now, 1 .. MAX_MATCH
    draft_match_lens: tuple[int, ...] = ()  # of each draft; empty: a token longer from draft to draft

    @property
    def match_lens(self) -> tuple[int, ...]:
        """Tokens that stood before each draft as they stand now."""
        return self.draft_match_lens or tuple(range(self.match_len, self.match_len + len(self.draft_ids)))


class TokenIndex:
    """Where each short run of one request's tokens stood last."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._tokens: list[int] = list(token_ids)
        self._followed_at: dict[tuple[int, ...], int] = {}
        self._num_filed = 0  # tokens whose runs are filed

    def append(self, token_id: int) -> None:
        """Only remembers the token: runs are filed when somebody looks up, which under load may be never."""
        self._tokens.append(token_id)

    def _file(self) -> None:
        """File the runs that ended since the last time and have a token behind them."""
        tokens = self._tokens
        for at in range(self._num_filed, len(tokens)):
            for length in FILED_LENGTHS:
                if at < length:
                    break
                self._followed_at[tuple(tokens[at - length : at])] = at
        self._num_filed = len(tokens)

    def look_up(self, num_drafts: int) -> Lookup | None:
        """What followed the longest match; None without a match. Where text repeats itself, so do the drafts."""
        self._file()
        tokens = self._tokens
        for length in reversed(FILED_LENGTHS):
            at = self._followed_at.get(tuple(tokens[-length:])) if len(tokens) > length else None
            if at is not None:
                period = len(tokens) - at
                draft_ids = tuple(tokens[at + slot % period] for slot in range(num_drafts))
                return Lookup(draft_ids, self._match_len(at, length))
        return None

    def _match_len(self, at: int, known: int) -> int:
        """Tokens before `at` that equal the latest ones."""
        tokens, length = self._tokens, known
        while length < min(MAX_MATCH, at) and tokens[at - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
