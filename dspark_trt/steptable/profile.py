"""Measures the step table on the machine that will serve (paper section 3.2.2): never assumed, never typed in.

A measured step is a real one: R requests at a context depth, `batch_tokens` packed tokens spread over them as anchor and
drafts (at most gamma + 1 each); what exceeds R * (gamma + 1) is a prefill chunk in a row of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from dspark_trt.contract.protocol import DraftBatch, DraftEngine, IngestBatch, TargetBatch, TargetEngine
from dspark_trt.steptable.table import StepTable

Progress = Callable[[float], None]  # called with the fraction done, 0..1

CONTEXT_DEPTH_TOKENS = 256
NUM_SWEEPS = 5
NUM_SWEEPS_OF_LONG_STEPS = 3
LONG_STEP_MS = 150.0
DRAFT = 0  # stands for "one draft block" where batch_tokens would stand

Key = tuple[int, int]  # num_requests, batch_tokens


def request_grid(max_slots: int) -> tuple[int, ...]:
    """1, 2, 4, … and the number of slots itself."""
    powers = [1 << shift for shift in range(max_slots.bit_length()) if 1 << shift <= max_slots]
    return tuple(sorted({*powers, max_slots}))


def token_grid(gamma: int, max_batch_tokens: int) -> tuple[int, ...]:
    """Every count within one draft block, then doubling, and the limit itself."""
    grid = set(range(1, min(gamma + 1, max_batch_tokens) + 1))
    value = 2 * (gamma + 1)
    while value < max_batch_tokens:
        grid.add(value)
        value *= 2
    return tuple(sorted({*grid, max_batch_tokens}))


def is_measured(num_requests: int, batch_tokens: int, gamma: int) -> bool:
    """Verification steps for every request count; steps with a prefill chunk beside a single request only.

    What a chunk adds hardly depends on the requests beside it, and `StepTable` prices it by what it adds there.
    """
    return num_requests <= batch_tokens and (num_requests == 1 or batch_tokens <= num_requests * (gamma + 1))


def verification_batch(num_requests: int, batch_tokens: int, gamma: int, depth: int, max_slots: int) -> TargetBatch:
    """The step to time: every request holds `depth` positions; token ids are arbitrary, the cost does not depend on them."""
    has_prefill = batch_tokens > num_requests * (gamma + 1)
    num_decode = num_requests - 1 if has_prefill and num_requests == max_slots else num_requests  # a chunk needs a row
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


def sweep(
    calls: Mapping[Key, Callable[[], object]],
    progress: Progress,
    *,
    synchronize: Callable[[], None] = lambda: None,
    num_warm_ups: int = 1,
) -> dict[Key, float]:
    """Median milliseconds of every call, `synchronize` included, after `num_warm_ups` that are not counted.

    All calls are timed once in each sweep, not one after the other: a burst of other work on the machine then falls on
    many points once instead of on one point always.
    """
    times: dict[Key, list[float]] = {key: [] for key in calls}
    num_sweeps = num_warm_ups + NUM_SWEEPS
    for index in range(num_sweeps):
        counted = index - num_warm_ups
        for position, (key, call) in enumerate(calls.items()):
            if counted < NUM_SWEEPS_OF_LONG_STEPS or times[key][0] < LONG_STEP_MS:
                start = time.perf_counter()
                call()
                synchronize()
                if counted >= 0:
                    times[key].append((time.perf_counter() - start) * 1e3)
            progress((index + position / len(calls)) / num_sweeps)
    return {key: statistics.median(measured) for key, measured in times.items()}


def profile(
    target: TargetEngine,
    drafter: DraftEngine,
    *,
    provenance: dict[str, Any],
    progress: Progress = lambda fraction: None,
    synchronize: Callable[[], None] = lambda: None,
    num_warm_ups: int = 1,
) -> StepTable:
    """Measure the grid.

    Args:
        synchronize: waits for what the engines have enqueued; a call is timed until then.
        num_warm_ups: calls of each kind before those that count.
    """
    limits, gamma = target.limits, drafter.gamma
    depth = min(CONTEXT_DEPTH_TOKENS, limits.max_seq_len - gamma - 1)
    requests = request_grid(limits.max_slots)
    tokens = token_grid(gamma, limits.max_batch_tokens)
    points = [(r, b) for r in requests for b in tokens if is_measured(r, b, gamma) and b <= limits.max_seq_len]
    calls: dict[Key, Callable[[], object]] = {
        (r, b): partial(target.forward, verification_batch(r, b, gamma, depth, limits.max_slots)) for r, b in points
    }
    calls |= {(r, DRAFT): draft_call(target, drafter, r, depth) for r in requests}
    measured = sweep(calls, progress, synchronize=synchronize, num_warm_ups=num_warm_ups)
    progress(1.0)
    return StepTable(
        num_requests=requests,
        batch_tokens=tokens,
        step_ms=tuple(tuple(measured.get((r, b)) for b in tokens) for r in requests),
        draft_ms=tuple(measured[r, DRAFT] for r in requests),
        provenance={**provenance, "context_depth_tokens": depth, "num_sweeps": NUM_SWEEPS},
    )


def draft_call(target: TargetEngine, drafter: DraftEngine, num_requests: int, depth: int) -> Callable[[], object]:
    """One draft block for `num_requests` requests, and the ingest of two committed positions each that goes before it.

    Taps are a copy of what the target gives, where it gives it: on a device they would otherwise be sent there every time.
    """
    num_tokens = min(2 * num_requests, target.limits.max_batch_tokens)
    verified = verification_batch(num_requests, num_tokens, drafter.gamma, depth, target.limits.max_slots)
    taps = target.forward(verified).taps
    rows = verified.rows
    ingest = IngestBatch(
        taps=array_namespace(taps).asarray(taps, copy=True),
        rows=rows,
        past_lengths=depth - verified.query_lengths,
        query_lengths=verified.query_lengths,
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

    return draft
