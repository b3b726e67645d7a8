"""The sizes that a step table has, and the step of each.

A measured step is a real one: R requests at a context depth, one token of each and `extra` more, spread over them as
drafts (at most gamma each); what exceeds R * gamma is a prefill chunk in a row of its own.
"""

from __future__ import annotations

import numpy as np

from dspark_trt.contract.acceptance import AcceptBatch
from dspark_trt.contract.protocol import EngineLimits, TargetBatch

SHALLOW_CONTEXT_TOKENS = 128
TILE_TOKENS = 12  # that ONNX Runtime's matrix kernels compute at once with AVX-512
DEEP_CONTEXT_TOKENS = (1024,)  # as far as the rows hold them

# generation_config.json of Qwen3
PUBLISHED_TEMPERATURE, PUBLISHED_TOP_K, PUBLISHED_TOP_P = 0.6, 20, 0.95


def request_grid(max_requests: int) -> tuple[int, ...]:
    """1, 2, 4, … and the number of slots itself."""
    powers = [1 << shift for shift in range(max_requests.bit_length()) if 1 << shift <= max_requests]
    return tuple(sorted({*powers, max_requests}))


def extra_grid(num_requests: int, gamma: int, limits: EngineLimits) -> tuple[int, ...]:
    """Extra tokens to time for a request count:
    dense where few, whole numbers of drafts a request, up to gamma of each.

    Beside a single request prefill chunks are timed too, up to the limit. What a chunk adds hardly depends on the
    requests beside it, and `StepTable` prices it by what it adds there.
    """
    most = limits.max_batch_tokens - num_requests
    few = {0, 1, 2, 3, 4, 6, 8, 12, 16, 24}
    if num_requests < TILE_TOKENS:  # calls of fewer may be cheaper padded (see `padding`)
        few.add(TILE_TOKENS - num_requests)
    drafts = {num_requests * count for count in range(gamma + 1) if count <= 4 or count == gamma}
    last = num_requests * gamma
    if num_requests == 1:
        last = min(most, limits.max_seq_len - 1)
        drafts |= {
            shift for shift in (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048) if shift < last
        } | {last}
    return tuple(sorted(extra for extra in few | drafts if extra <= min(last, most)))


def padded_extra_grid(num_requests: int, gamma: int, limits: EngineLimits) -> tuple[int, ...]:
    """Extra tokens that fill the buckets of a runtime that pads packed tokens to powers of two."""
    most = min(limits.max_batch_tokens, _most_tokens(num_requests, gamma, limits))
    last = most if num_requests == 1 else min(limits.max_batch_tokens, num_requests * (gamma + 1))
    buckets = [1 << shift for shift in range(limits.max_batch_tokens.bit_length())]
    return tuple(sorted({0} | {bucket - num_requests for bucket in buckets if num_requests < bucket <= last}))


def ingest_grid(gamma: int, limits: EngineLimits) -> tuple[int, ...]:
    """Context tokens to time the drafter's ingest for."""
    most = min(limits.max_batch_tokens, _most_tokens(limits.max_requests, gamma, limits))
    return tuple(sorted({min(count, most) for count in (1, 4, 16, 64, 256)}))


def _most_tokens(num_requests: int, gamma: int, limits: EngineLimits) -> int:
    """Of the step that `verification_batch` makes: whole blocks, and a chunk in a row of its own."""
    num_decode = min(num_requests, limits.max_requests - 1)
    return num_decode * (gamma + 1) + limits.max_seq_len


def context_grid(limits: EngineLimits, gamma: int) -> tuple[int, ...]:
    """Positions that every request holds: shallow, and as deep as rows go up to the depths above."""
    room = limits.max_seq_len - gamma - 1
    return tuple(sorted({min(SHALLOW_CONTEXT_TOKENS, room), *(min(depth, room) for depth in DEEP_CONTEXT_TOKENS)}))


def verification_batch(num_requests: int, batch_tokens: int, gamma: int, depth: int, max_requests: int) -> TargetBatch:
    """The step to time: every request holds `depth` positions;
    token ids are arbitrary, the cost does not depend on them."""
    has_prefill = batch_tokens > num_requests * (gamma + 1)
    num_decode = (
        num_requests - 1 if has_prefill and num_requests == max_requests else num_requests
    )  # a chunk needs a row
    in_decode = min(batch_tokens, num_decode * (gamma + 1))
    lengths = np.full(num_decode, in_decode // max(num_decode, 1), dtype=np.int64)
    lengths[: in_decode - int(lengths.sum())] += 1
    past = np.full(num_decode, depth, dtype=np.int64)
    wanted = np.arange(in_decode)  # verification asks for every logit, a prefill chunk for its last
    if batch_tokens > in_decode:
        lengths = np.append(lengths, batch_tokens - in_decode)
        past = np.append(past, 0)
        wanted = np.append(wanted, batch_tokens - 1)
    return TargetBatch(
        token_ids=np.arange(batch_tokens, dtype=np.int64) % 97,
        rows=np.arange(len(lengths), dtype=np.int64),
        past_lengths=past,
        query_lengths=lengths,
        num_decode=num_decode,
        logit_rows=wanted,
    )


def sampled_rows(batch: TargetBatch) -> AcceptBatch:
    """The acceptance of that step: every request samples as published models ask for, and its drafts are argmaxes."""
    lengths = batch.query_lengths[: batch.num_decode]
    lengths = np.append(lengths, np.ones(len(batch.query_lengths) - batch.num_decode, dtype=np.int64))
    ends = np.cumsum(lengths)
    num_rows = int(ends[-1])
    rows, first_rows = np.arange(num_rows), np.repeat(ends - lengths, lengths)
    draft_ids = np.zeros(num_rows, dtype=np.int64)
    draft_ids[ends - 1] = -1
    nothing, zeros, none = np.full(num_rows, -1), np.zeros(num_rows, dtype=np.int64), np.empty(0, dtype=np.int64)
    off, ones = np.zeros(num_rows, dtype=np.float32), np.ones(num_rows, dtype=np.float32)
    words = np.random.default_rng(0).integers(-(2**63), 2**63, (3, num_rows))
    return AcceptBatch(
        logit_rows=rows,
        slots=rows - first_rows,
        first_rows=first_rows,
        draft_ids=draft_ids,
        draft_rows=zeros,
        draws=nothing,
        samples=rows,
        accept_words=words[0],
        residual_words=words[1],
        bonus_words=words[2],
        top_k=np.full(num_rows, PUBLISHED_TOP_K),
        edit_begins=zeros,
        edit_ends=zeros,
        temperatures=ones * np.float32(PUBLISHED_TEMPERATURE),
        draft_temperatures=off,
        top_p=ones * np.float32(PUBLISHED_TOP_P),
        min_p=off,
        repetition_penalties=ones,
        presence_penalties=off,
        frequency_penalties=off,
        sampled_rows=rows,
        truncated_rows=rows,
        drawn_rows=none,
        edited_rows=none,
        reported_rows=none,
        edit_ids=none,
        edit_masks=none,
        edit_is_seen=none,
        edit_counts=off[:0],
        edit_bias=off[:0],
    )
