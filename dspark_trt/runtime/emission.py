"""What a client gets from one step: new tokens, the text that became certain, log probabilities, the end.

A request ends, in this order of precedence, with
    "stop"     EOS or a stop token: it is in `token_ids`, its text is not in `text`
    "stop"     a stop string: `token_ids` end with the token that completes it, `text` before or behind it as asked
    "length"   max_tokens, or the last position of the KV row
Tokens of the block behind the end are dropped.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dspark_trt.runtime.acceptance import Acceptance
from dspark_trt.runtime.metrics import FinishReason, RequestStatistics
from dspark_trt.runtime.sampling import TopLogProbs
from dspark_trt.runtime.state import RequestState
from dspark_trt.runtime.verification import Segment

logger = logging.getLogger(__name__)

DECODE_FAILED = "the generated tokens cannot be turned into text; report this with the request"


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
    state.next_step()
    if not segment.is_prefill:
        num_emitted = len(emission.token_ids)
        state.record_step(
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
        state.push_token(token_id)
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
