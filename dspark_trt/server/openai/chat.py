"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dspark_trt.server.openai.answers import Decode
from dspark_trt.server.openai.pieces import Tally
from dspark_trt.server.openai.triton import Piece

_UNFINISHED = "�"  # in the text of a token that ends or begins within a character


@dataclass(frozen=True, slots=True)
class ChatFormat:
    decode: Decode  # of token ids, special tokens included
    with_log_probs: bool

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def whole(self, index: int, tally: Tally) -> dict[str, Any]:
        message = {"role": "assistant", "content": tally.text, "refusal": None}
        log_probs = self._log_probs(tally.token_ids, tally.log_probs)
        return {"index": index, "message": message, "logprobs": log_probs, "finish_reason": tally.finish_reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece, num_characters: int) -> dict[str, Any] | None:
        log_probs = self._log_probs(piece.token_ids, piece.log_probs)
        if not (piece.text or piece.finish_reason or log_probs):
            return None
        delta = {"content": piece.text} if piece.text else {}
        return {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": piece.finish_reason or None}

    def _log_probs(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any] | None:
        if not self.with_log_probs:
            return None
        tokens = [self.decode([token_id]) for token_id in token_ids]
        content = [
            {"token": token, "logprob": log_prob, "bytes": _bytes(token), "top_logprobs": []}
            for token, log_prob in zip(tokens, log_probs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _bytes(token: str) -> list[int] | None:
    return None if _UNFINISHED in token else list(token.encode())
