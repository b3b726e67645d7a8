"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from dspark_trt.server.openai.answers import Decode
from dspark_trt.server.openai.pieces import Tally
from dspark_trt.server.openai.triton import Piece


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    decode: Decode  # of token ids, special tokens included
    with_log_probs: bool
    echoed: Sequence[str]  # what stands before each answer: its prompt, or nothing

    id_prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def whole(self, index: int, tally: Tally) -> dict[str, Any]:
        return {
            "index": index,
            "text": self.echoed[index] + tally.text,
            "logprobs": self._log_probs(tally.token_ids, tally.log_probs, 0),
            "finish_reason": tally.finish_reason,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        if not self.echoed[index]:
            return None
        return {"index": index, "text": self.echoed[index], "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece, num_characters: int) -> dict[str, Any] | None:
        log_probs = self._log_probs(piece.token_ids, piece.log_probs, num_characters)
        if not (piece.text or piece.finish_reason or log_probs):
            return None
        return {
            "index": index,
            "text": piece.text,
            "logprobs": log_probs,
            "finish_reason": piece.finish_reason or None,
        }

    def _log_probs(self, token_ids: Sequence[int], log_probs: Sequence[float], start: int) -> dict[str, Any] | None:
        if not self.with_log_probs:
            return None
        tokens = [self.decode([token_id]) for token_id in token_ids]
        offsets = list(accumulate((len(token) for token in tokens), initial=start))[:-1]
        return {"tokens": tokens, "token_logprobs": list(log_probs), "top_logprobs": None, "text_offset": offsets}
