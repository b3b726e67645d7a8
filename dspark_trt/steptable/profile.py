"""Measures the step table on the machine that will serve (paper section 3.2.2): never assumed, never typed in.

A measured step is a real one: R requests at a context depth, one token of each and `extra` more, spread over them as
drafts (at most gamma each); what exceeds R * gamma is a prefill chunk in a row of its own.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
from array_api_compat import array_namespace

from dspark_trt.contract.drafter_form import slot_counts
from dspark_trt.contract.protocol import DraftBatch, DraftEngine, EngineLimits, IngestBatch, TargetBatch, TargetEngine
from dspark_trt.log import Progress
from dspark_trt.steptable.table import StepTable, isotonic

SHALLOW_CONTEXT_TOKENS = 128
DEEP_CONTEXT_TOKENS = (1024,)  # as far as the rows hold them
NUM_SWEEPS = 5
NUM_SWEEPS_OF_LONG_STEPS = 3
LONG_STEP_MS = 150.0
NOISE = 0.15  # a fall by more than this share, as tokens are added, is not noise of a quiet machine

Key = tuple[Literal["step", "draft", "ingest"], int, int, int]  # depth, num_requests, extra tokens | slots | tokens

logger = logging.getLogger(__name__)


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
    last = limits.max_batch_tokens if num_requests == 1 else min(limits.max_batch_tokens, num_requests * (gamma + 1))
    buckets = [1 << shift for shift in range(limits.max_batch_tokens.bit_length())]
    return tuple(sorted({0} | {bucket - num_requests for bucket in buckets if num_requests < bucket <= last}))


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
    drafter: DraftEngine | None,
    *,
    gamma: int,
    provenance: dict[str, Any],
    is_padded: bool = False,
    progress: Progress = lambda fraction: None,
    synchronize: Callable[[], None] = lambda: None,
    num_warm_ups: int = 1,
) -> StepTable:
    """Measure the grid.

    Args:
        drafter: None: nothing of it is measured.
        gamma: drafts of a request that a step verifies at most.
        is_padded: calls are padded to powers of two, so those are the sizes to time.
        synchronize: waits for what the engines have enqueued; a call is timed until then.
        num_warm_ups: calls of each kind before those that count.
    """
    limits = target.limits
    requests, depths = request_grid(limits.max_requests), context_grid(limits, gamma)
    slots: tuple[int, ...] = ()
    ingested: tuple[int, ...] = ()
    grid = padded_extra_grid if is_padded else extra_grid
    extras = {count: grid(count, gamma, limits) for count in requests}
    if drafter is not None:
        slots = slot_counts(gamma)
        ingested = tuple(sorted({min(count, limits.max_batch_tokens) for count in (1, 4, 16, 64, 256)}))
    calls: dict[Key, Callable[[], object]] = {}
    for depth in depths:
        for count in requests:
            for extra in extras[count] if depth == depths[0] else _deep(extras[count], count):
                batch = verification_batch(count, count + extra, gamma, depth, limits.max_requests)
                calls["step", depth, count, extra] = partial(target.forward, batch)
            for num_slots in slots:
                assert drafter is not None, "it has slots"
                calls["draft", depth, count, num_slots] = partial(drafter.draft, _block(count, num_slots, depth))
    for num_tokens in ingested:
        assert drafter is not None, "it takes taps"
        calls["ingest", 0, 0, num_tokens] = partial(drafter.ingest, _ingest(target, num_tokens, gamma, depths[0]))
    measured = sweep(calls, progress, synchronize=synchronize, num_warm_ups=num_warm_ups)
    progress(1.0)
    extra_tokens = tuple(sorted({extra for grid in extras.values() for extra in grid}))
    falls = _falls(measured, depths[0], extras)
    if falls:
        logger.warning(
            "the step table falls where tokens are added (%s): this machine was busy while it was measured; run "
            "`dspark-trt profile` again when it is quiet",
            "; ".join(falls),
        )
    return StepTable(
        is_padded=is_padded,
        num_requests=requests,
        context_tokens=depths,
        extra_tokens=extra_tokens,
        step_ms=tuple(
            tuple(tuple(measured.get(("step", depth, count, extra)) for extra in extra_tokens) for count in requests)
            for depth in depths
        ),
        num_slots=slots,
        draft_ms=tuple(
            tuple(tuple(measured["draft", depth, count, each] for each in slots) for count in requests)
            for depth in depths
        ),
        ingest_tokens=ingested,
        ingest_ms=tuple(measured["ingest", 0, 0, each] for each in ingested),
        provenance={**provenance, "num_sweeps": NUM_SWEEPS, "falls_beyond_noise": falls},
    )


def _deep(extras: tuple[int, ...], num_requests: int) -> tuple[int, ...]:
    """What is timed again at a deeper context: what depth adds hardly bends with the tokens."""
    return tuple(extra for extra in extras if extra in (0, num_requests, 3 * num_requests))


def _falls(measured: Mapping[Key, float], depth: int, extras: Mapping[int, tuple[int, ...]]) -> list[str]:
    """Points whose time lies below that of fewer tokens by more than noise."""
    found = []
    for count, grid in extras.items():
        times = [measured["step", depth, count, extra] for extra in grid]
        found += [
            f"{count} requests, {count + extra} tokens: {ms:.1f} ms, {repaired:.1f} ms expected"
            for extra, ms, repaired in zip(grid, times, isotonic(times), strict=True)
            if ms < repaired * (1 - NOISE)
        ]
    return found


def _block(num_requests: int, num_slots: int, depth: int) -> DraftBatch:
    rows = np.arange(num_requests, dtype=np.int64)
    return DraftBatch(
        rows=rows,
        anchor_ids=rows % 97,
        past_lengths=np.full(num_requests, depth, np.int64),
        temperatures=np.zeros(num_requests, np.float32),
        uniforms=np.zeros((num_requests, num_slots), np.float32),
        wants_logits=False,
    )


def _ingest(target: TargetEngine, num_tokens: int, gamma: int, depth: int) -> IngestBatch:
    """Taps are a copy of what the target gives, where it gives it:
    on a device they would otherwise be sent there every time."""
    max_requests = target.limits.max_requests
    num_rows = min(num_tokens, max_requests)
    verified = verification_batch(num_rows, num_tokens, gamma, depth, max_requests)
    taps = target.forward(verified).taps
    return IngestBatch(
        taps=array_namespace(taps).asarray(taps, copy=True),
        rows=verified.rows,
        past_lengths=np.maximum(verified.past_lengths - verified.query_lengths, 0),
        query_lengths=verified.query_lengths,
    )
