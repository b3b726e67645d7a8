"""What a client gets from one step: new tokens, the text that became certain, log probabilities, the end.

Tokens are decoded here, where all tokens of the request are known, never chunk by chunk: a token may hold half a
character, and whether it begins with a space can depend on the token before it.

A request ends, in this order of precedence, with
    "stop"     EOS or a stop token: it is in `token_ids`, its text is not in `text`
    "stop"     a stop string: `token_ids` end with the token that completes it, `text` before or behind it as asked
    "length"   max_tokens, or the last position of the KV row
Tokens of the block behind the end are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark_trt.runtime.metrics import FinishReason, RequestStatistics

if TYPE_CHECKING:  # a request's state holds its TextStream
    from dspark_trt.runtime.acceptance import Acceptance
    from dspark_trt.runtime.sampling import TopLogProbs
    from dspark_trt.runtime.state import RequestState
    from dspark_trt.runtime.verification import Segment

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]

NUM_PROMPT_TOKENS_FOR_CONTEXT = 5
REPLACEMENT_CHARACTER = "\ufffd"  # what a decoder puts for bytes that are no character, or not yet one
DECODE_FAILED = "the generated tokens cannot be turned into text; report this with the request"


class Detokenizer:
    """Text of a growing token sequence, character by complete character.

    The window [_start, _read) has been handed out; it is decoded again with the new tokens, so that the decoder sees
    what stands before them. What it adds to the window's own text is new.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt_ids[-NUM_PROMPT_TOKENS_FOR_CONTEXT:])
        self._start, self._read = 0, len(self._tokens)
        if decode(self._tokens).endswith(REPLACEMENT_CHARACTER):  # the prompt ends inside a character: not ours
            self._start = self._read

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        self._tokens.append(token_id)
        text, num_known = self._window()
        if len(text) <= num_known or text.endswith(REPLACEMENT_CHARACTER):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[num_known:]

    def flush(self) -> str:
        """What is left: an unfinished character, as the decoder shows it."""
        text, num_known = self._window()
        self._start = self._read = len(self._tokens)
        return text[num_known:]

    def _window(self) -> tuple[str, int]:
        """The window's text with all new tokens, and how many of its characters are handed out."""
        known = self._decode(self._tokens[self._start : self._read])
        return self._decode(self._tokens[self._start :]), len(known)


class TextStream:
    """Text of one request up to its stop string.

    The stop string that is completed first ends the text, however the tokens split it; among those completed by the same
    character, the longest.
    """

    def __init__(
        self, decode: Decode, prompt_ids: Sequence[int], *, stop_strings: Sequence[str], include_stop_string: bool
    ) -> None:
        self._detokenizer = Detokenizer(decode, prompt_ids)
        self._stop_strings = tuple(stop_strings)
        self._include_stop_string = include_stop_string
        self._held = ""  # might be the beginning of a stop string

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, bool]:
        """(text that may be sent, whether this token completed a stop string)."""
        text = self._held + self._detokenizer.push(token_id)
        matches = [(at + len(stop), at) for stop in self._stop_strings if may_stop and (at := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self._held = ""
            return text[: end if self._include_stop_string else start], True
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """All that was held back: the request ended for another reason."""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        return text

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(len(stop) > length and stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What one step gave to one request.

    `text` may lag behind `token_ids`: characters that are not complete and text that may still become a stop string are
    held back. The last emission of a request has a finish_reason and its statistics.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    log_probs: tuple[float, ...] | None = None  # raw log-softmax of each token at its position; None: not asked for
    top_log_probs: tuple[TopLogProbs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None  # fit for a client; with finish_reason "error"
    statistics: RequestStatistics | None = None


def emit_result(segment: Segment, result: Acceptance) -> Emission | None:
    """What the step decided for one request, with its statistics brought up to date. None: its prompt goes on."""
    state = segment.state
    if result.error:
        return emit_end(state, "error", result.error)
    if not result.token_ids:
        return None
    try:
        emission = _emit_tokens(state, result)
    except Exception:  # `decode` is the caller's: only this request fails
        logger.exception("decoding the tokens of request %r failed", state.request.request_id)
        return emit_end(state, "error", DECODE_FAILED)
    state.step_index += 1
    if segment.is_prefill:
        state.statistics.first_token_ms = state.elapsed_ms()
    else:
        num_emitted = len(emission.token_ids)
        state.statistics.record_step(
            num_proposed=segment.num_proposed,
            verify_len=len(segment.draft_ids),
            num_accepted=min(result.num_accepted_drafts, num_emitted),
            num_emitted=num_emitted,
        )
    return emission


def emit_end(state: RequestState, reason: FinishReason, error: str | None = None) -> Emission:
    """End a request that no token ends: cancelled or failed. What its text stream holds back is dropped."""
    return Emission(request_id=state.request.request_id, finish_reason=reason, error=error, statistics=state.statistics)


def _emit_tokens(state: RequestState, result: Acceptance) -> Emission:
    """The tokens up to the end of the request, if it lies among them."""
    params, statistics = state.params, state.statistics
    texts: list[str] = []
    reason: FinishReason | None = None
    num_kept, is_stopped = 0, False
    for token_id in result.token_ids:
        num_kept += 1
        statistics.num_generated_tokens += 1
        state.anchor_id = token_id
        is_ending = token_id in state.ending_ids
        if not is_ending:
            text, is_stopped = state.stream.push(token_id, may_stop=state.num_generated >= params.min_tokens)
            texts.append(text)
        if is_ending or is_stopped:
            reason = "stop"
        elif state.num_remaining == 0:
            reason = "length"
        if reason:
            break
    if reason and not is_stopped:
        texts.append(state.stream.flush())
    has_log_probs = params.num_log_probs is not None
    return Emission(
        request_id=state.request.request_id,
        token_ids=tuple(result.token_ids[:num_kept]),
        text="".join(texts),
        log_probs=tuple(result.log_probs[:num_kept]) if has_log_probs else None,
        top_log_probs=tuple(result.top_log_probs[:num_kept]) if has_log_probs else None,
        finish_reason=reason,
        statistics=statistics if reason else None,
    )
