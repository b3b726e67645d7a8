"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from dspark_trt.server.openai.answers import Decode
from dspark_trt.server.openai.pieces import Tally
from dspark_trt.server.openai.triton import Alternatives, Piece


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    decode: Decode  # of token ids, special tokens included
    num_log_probs: int | None  # alternatives to each token; None: no log probabilities
    echoed: Sequence[str]  # what stands before each answer: its prompt, or nothing

    id_prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def whole(self, index: int, tally: Tally) -> dict[str, Any]:
        return {
            "index": index,
            "text": self.echoed[index] + tally.text,
            "logprobs": self._log_probs(tally, 0),
            "finish_reason": tally.finish_reason,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        if not self.echoed[index]:
            return None
        return {"index": index, "text": self.echoed[index], "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece, num_characters: int) -> dict[str, Any] | None:
        log_probs = self._log_probs(piece, num_characters)
        if not (piece.text or piece.finish_reason or log_probs):
            return None
        return {
            "index": index,
            "text": piece.text,
            "logprobs": log_probs,
            "finish_reason": piece.finish_reason or None,
        }

    def _log_probs(self, made: Piece | Tally, start: int) -> dict[str, Any] | None:
        if self.num_log_probs is None:
            return None
        tokens = [self.decode([token_id]) for token_id in made.token_ids]
        offsets = list(accumulate((len(token) for token in tokens), initial=start))[:-1]
        chosen = zip(made.token_ids, made.log_probs, strict=True)
        top = [
            self._by_text((*others, token)) for others, token in zip(made.top_log_probs, chosen, strict=False)
        ]  # nothing where no alternatives were asked for
        return {
            "tokens": tokens,
            "token_logprobs": list(made.log_probs),
            "top_logprobs": top or None,
            "text_offset": offsets,
        }

    def _by_text(self, alternatives: Alternatives) -> dict[str, float]:
        """The chosen token is among them, as with OpenAI. Of tokens with one text the most probable one counts."""
        found: dict[str, float] = {}
        for token_id, log_prob in alternatives:
            found.setdefault(self.decode([token_id]), log_prob)
        return found
