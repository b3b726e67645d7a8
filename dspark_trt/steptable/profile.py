"""Measures the step table on the machine that will serve (paper section 3.2.2): never assumed, never typed in.

A measured step is a real one: R requests at a context depth, `batch_tokens` packed tokens spread over them as anchor and
drafts (at most gamma + 1 each); what exceeds R * (gamma + 1) is a prefill chunk in a row of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dspark_trt.engines.protocol import DraftBatch, DraftEngine, IngestBatch, TargetBatch, TargetEngine
from dspark_trt.steptable.table import StepTable

Progress = Callable[[float], None]  # called with the fraction done, 0..1

CONTEXT_DEPTH_TOKENS = 256
NUM_REPEATS = 5
NUM_REPEATS_OF_LONG_STEPS = 3
LONG_STEP_MS = 250.0


def request_grid(max_slots: int) -> tuple[int, ...]:
    """1, 2, 4, … and the number of slots itself."""
    powers = [1 << shift for shift in range(max_slots.bit_length()) if 1 << shift <= max_slots]
    return tuple(sorted({*powers, max_slots}))


def token_grid(gamma: int, max_batch_tokens: int) -> tuple[int, ...]:
    """Dense over one draft block, then by steps of about a half."""
    grid = set(range(1, min(gamma + 1, max_batch_tokens) + 1))
    value = gamma + 1
    while value < max_batch_tokens:
        grid.add(value)
        value = max(value + 1, value * 3 // 2)
    return tuple(sorted({*grid, max_batch_tokens}))


def verification_batch(num_requests: int, batch_tokens: int, gamma: int, depth: int, max_slots: int) -> TargetBatch:
    """The step to time: every request holds `depth` positions; token ids are arbitrary, the cost does not depend on them."""
    in_decode = min(batch_tokens, num_requests * (gamma + 1))
    prefill = batch_tokens - in_decode
    if prefill and num_requests == max_slots:  # the prefill chunk needs a row
        num_requests -= 1
    lengths = np.full(num_requests, in_decode // max(num_requests, 1), dtype=np.int64)
    lengths[: in_decode - int(lengths.sum())] += 1
    lengths = np.minimum(lengths, gamma + 1)
    num_decode = num_requests
    if batch_tokens > lengths.sum():
        lengths = np.append(lengths, batch_tokens - lengths.sum())
    num_segments = len(lengths)
    past = np.full(num_segments, depth, dtype=np.int64)
    past[num_decode:] = 0
    # verification asks for every logit, a prefill chunk for its last
    wanted = np.arange(lengths[:num_decode].sum())
    if num_segments > num_decode:
        wanted = np.append(wanted, batch_tokens - 1)
    return TargetBatch(
        token_ids=np.arange(batch_tokens, dtype=np.int64) % 97,
        rows=np.arange(num_segments, dtype=np.int64),
        past_lengths=past,
        query_lengths=lengths,
        num_decode=num_decode,
        logit_rows=wanted.astype(np.int64),
    )


def median_ms(call: Callable[[], Any]) -> float:
    """Median of a few calls after one that is not counted."""
    call()
    times = [_timed_ms(call)]
    repeats = NUM_REPEATS if times[0] < LONG_STEP_MS else NUM_REPEATS_OF_LONG_STEPS
    times += [_timed_ms(call) for _ in range(repeats - 1)]
    return statistics.median(times)


def _timed_ms(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def profile(
    target: TargetEngine,
    drafter: DraftEngine,
    *,
    tap_width: int,
    provenance: dict[str, Any],
    progress: Progress = lambda fraction: None,
) -> StepTable:
    """Measure every point of the grid that exists. `tap_width` is M * D, the width of the taps the drafter ingests."""
    limits, gamma = target.limits, drafter.gamma
    depth = min(CONTEXT_DEPTH_TOKENS, limits.max_seq_len - gamma - 1)
    requests = request_grid(limits.max_slots)
    tokens = token_grid(gamma, limits.max_batch_tokens)
    points = [
        (r, b)
        for r in requests
        for b in tokens
        if b >= r and _exists(r, b, gamma, limits.max_slots, limits.max_seq_len)
    ]
    measured: dict[tuple[int, int], float] = {}
    total = sum(b for _, b in points) or 1
    done = 0
    for num_requests, batch_tokens in points:
        batch = verification_batch(num_requests, batch_tokens, gamma, depth, limits.max_slots)
        measured[num_requests, batch_tokens] = median_ms(partial(target.forward, batch))
        done += batch_tokens
        progress(0.95 * done / total)
    draft_ms = tuple(_draft_ms(drafter, count, depth, tap_width) for count in requests)
    progress(1.0)
    return StepTable(
        num_requests=requests,
        batch_tokens=tokens,
        step_ms=tuple(tuple(measured.get((r, b)) for b in tokens) for r in requests),
        draft_ms=draft_ms,
        provenance={**provenance, "context_depth_tokens": depth, "repeats": NUM_REPEATS},
    )


def _exists(num_requests: int, batch_tokens: int, gamma: int, max_slots: int, max_seq_len: int) -> bool:
    prefill = batch_tokens - num_requests * (gamma + 1)
    return prefill <= 0 or (max_slots > 1 and prefill + gamma + 1 <= max_seq_len)


def _draft_ms(drafter: DraftEngine, num_requests: int, depth: int, tap_width: int) -> float:
    """One draft block for `num_requests` requests, and the ingest of two committed positions each that goes before it."""
    rows = np.arange(num_requests, dtype=np.int64)
    ingest = IngestBatch(
        taps=np.zeros((2 * num_requests, tap_width), np.float32),
        rows=rows,
        past_lengths=np.full(num_requests, depth - 2, np.int64),
        query_lengths=np.full(num_requests, 2, np.int64),
    )
    block = DraftBatch(
        rows=rows,
        anchor_ids=rows % 97,
        past_lengths=np.full(num_requests, depth, np.int64),
        temperatures=np.zeros(num_requests, np.float32),
        uniforms=np.zeros((num_requests, drafter.gamma), np.float32),
    )

    def draft() -> None:
        drafter.ingest(ingest)
        drafter.draft(block)

    return median_ms(draft)
