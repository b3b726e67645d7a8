"""Answers of /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dspark_trt.server.openai.answers import Decode
from dspark_trt.server.openai.pieces import Tally
from dspark_trt.server.openai.triton import Piece

_UNFINISHED = "�"  # in the text of a token that ends or begins within a character


@dataclass(frozen=True, slots=True)
class ChatFormat:
    decode: Decode  # of token ids, special tokens included
    num_log_probs: int | None  # alternatives to each token; None: no log probabilities

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def whole(self, index: int, tally: Tally) -> dict[str, Any]:
        message = {"role": "assistant", "content": tally.text, "refusal": None}
        log_probs = self._log_probs(tally)
        return {"index": index, "message": message, "logprobs": log_probs, "finish_reason": tally.finish_reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece, num_characters: int) -> dict[str, Any] | None:
        log_probs = self._log_probs(piece)
        if not (piece.text or piece.finish_reason or log_probs):
            return None
        delta = {"content": piece.text} if piece.text else {}
        return {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": piece.finish_reason or None}

    def _log_probs(self, made: Piece | Tally) -> dict[str, Any] | None:
        if self.num_log_probs is None:
            return None
        alternatives = made.top_log_probs or [()] * len(made.token_ids)
        content = [
            {**self._token(token_id, log_prob), "top_logprobs": [self._token(*each) for each in others]}
            for token_id, log_prob, others in zip(made.token_ids, made.log_probs, alternatives, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, log_prob: float) -> dict[str, Any]:
        token = self.decode([token_id])
        return {"token": token, "logprob": log_prob, "bytes": _bytes(token)}


def _bytes(token: str) -> list[int] | None:
    return None if _UNFINISHED in token else list(token.encode())
