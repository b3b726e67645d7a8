"""PrefixSelect in NumPy: how many drafts of each request are verified, and the index tensors of that step.

`runtime/prefix_scheduler` chooses the same lengths in `lagged_budget`.

Shape letters: `R` requests, `G` gamma, `T` packed tokens, `B` KV rows of the target's row group.
Source: paper section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.integer[Any]]
BoolArray = NDArray[np.bool_]


def prefix_select(form: PrefixSelectForm, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """All outputs by name, from inputs by name; README.md has both tables."""
    fresh = survival(inputs["confidence_logits"], inputs["temperatures"])
    verify_len = lagged_budget(
        fresh,
        caps=inputs["caps"],
        is_forced=inputs["is_forced"] > 0,
        num_admitted=int(inputs["num_admitted"][0]),
    )
    return {"verify_len": verify_len, **pack_tokens(verify_len, inputs), **pack_rows(verify_len, inputs)}


def num_tokens_of(verify_len: IntArray, caps: IntArray) -> IntArray:
    """Packed tokens of each request, [R]: its anchor and drafts; none of a padding request, whose cap is below 0."""
    tokens: IntArray = np.where(caps >= 0, verify_len + 1, 0)
    return tokens


def pack_tokens(verify_len: IntArray, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What stands at each packed token: every request's anchor and drafts. Padding repeats the last token."""
    gamma = inputs["draft_ids"].shape[1]
    blocks = np.concatenate([inputs["anchor_ids"][:, None], inputs["draft_ids"]], axis=1)  # [R, G + 1]
    num_tokens = num_tokens_of(verify_len, inputs["caps"])
    ends = np.cumsum(num_tokens)
    first_tokens = ends - num_tokens
    tokens = np.minimum(inputs["token_index"], ends[-1] - 1)
    requests = np.searchsorted(first_tokens, tokens, side="right") - 1
    slots = tokens - first_tokens[requests]
    return {
        "num_tokens": ends[-1:],
        "first_tokens": first_tokens,
        "token_requests": requests,
        "token_ids": blocks[requests, slots],
        "positions": inputs["past_lengths"][requests] + slots,
        "padded_indices": inputs["block_rows"][requests] * (gamma + 1) + slots,
    }


def pack_rows(verify_len: IntArray, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The target's row group. Padding points at the row's last token, in a row without request at token 0."""
    requests, is_used = inputs["row_requests"], inputs["row_query_lengths"] > 0
    requests = np.where(is_used, requests, 0)
    lengths = np.where(is_used, verify_len[requests], 0)
    num_tokens = num_tokens_of(verify_len, inputs["caps"])
    first_tokens = np.where(is_used, (np.cumsum(num_tokens) - num_tokens)[requests], 0)
    slots = np.arange(inputs["draft_ids"].shape[1] + 1)
    return {
        "decode.tokens": first_tokens[:, None] + np.minimum(slots, lengths[:, None]),
        "decode.past_lengths": np.where(is_used, inputs["past_lengths"][requests], 0),
        "decode.query_lengths": np.where(is_used, lengths + 1, 0),
    }


def survival(confidence_logits: FloatArray, temperatures: FloatArray) -> NDArray[np.float64]:
    """P(draft j and all before it are accepted), [R, G], from raw confidences [R, G] and STS temperatures [G].

    A non-finite confidence counts as survival 0 from there on. Source: paper section 3.2.1.
    """
    logits = confidence_logits.astype(np.float64)
    is_finite = np.isfinite(logits)
    calibrated = np.where(is_finite, logits, 0) / temperatures
    confidence = 0.5 * (1 + np.tanh(0.5 * calibrated))  # a sigmoid that cannot overflow
    return np.cumprod(np.where(is_finite, confidence, 0.0), axis=1, dtype=np.float64)


def lagged_budget(
    survival: FloatArray, *, caps: IntArray, is_forced: BoolArray, num_admitted: int
) -> NDArray[np.int64]:
    """Admit the `num_admitted` drafts of highest survival: verify_len [R]. Forced requests are not counted.

    `num_admitted` comes from survivals two steps old; the fresh ones only rank.
    """
    verify_len = np.where(is_forced, np.maximum(caps, 0), 0).astype(np.int64)
    for request, _ in ranked(survival, caps, is_forced)[: max(num_admitted, 0)]:
        verify_len[request] += 1
    return verify_len


def ranked(survival: FloatArray, caps: IntArray, is_forced: BoolArray) -> list[tuple[int, int]]:
    """Drafts (request, draft from 0) that may be admitted, by falling survival, ties by (draft, request).

    Survival never rises along a block, so every draft stands behind the ones before it.
    """
    candidates = [(r, j) for r, cap in enumerate(caps) if not is_forced[r] for j in range(cap)]
    return sorted(candidates, key=lambda at: (-survival[at], at[1], at[0]))
