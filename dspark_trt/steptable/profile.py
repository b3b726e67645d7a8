"""Measures the step table on the machine that will serve (paper section 3.2.2): never assumed, never typed in."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from dspark_trt.contract.acceptance import AcceptEngine
from dspark_trt.contract.drafter_form import slot_counts
from dspark_trt.contract.protocol import DraftBatch, DraftEngine, IngestBatch, TargetBatch, TargetEngine
from dspark_trt.log import Progress
from dspark_trt.machine.load import LoadWatch
from dspark_trt.steptable.doubts import doubts_of, steadier
from dspark_trt.steptable.grid import (
    context_grid,
    extra_grid,
    ingest_grid,
    padded_extra_grid,
    request_grid,
    sampled_rows,
    verification_batch,
)
from dspark_trt.steptable.sweep import Calls, Key, Timing, sweep
from dspark_trt.steptable.table import StepTable

logger = logging.getLogger(__name__)


def profile(
    target: TargetEngine,
    drafter: DraftEngine | None,
    *,
    gamma: int,
    acceptance: AcceptEngine | None = None,
    provenance: dict[str, Any],
    is_padded: bool = False,
    progress: Progress = lambda fraction: None,
    synchronize: Callable[[], None] = lambda: None,
    num_warm_ups: int = 1,
    num_threads: int = 1,
    budget_s: float = math.inf,
) -> StepTable:
    """Measure the grid; where the result is doubtful, its suspect calls once more. What doubt is left is logged, and
    stands in the table's provenance as `doubts`.

    Args:
        drafter: None: nothing of it is measured.
        gamma: drafts of a request that a step verifies at most.
        acceptance: where an engine accepts, its time is part of a step's, as for requests that sample with top_k and
            top_p; where the runtime does, it is part of the host's time.
        is_padded: calls are padded to powers of two, so those are the sizes to time.
        synchronize: waits for what the engines have enqueued; a call is timed until then.
        num_warm_ups: calls of each kind before those that count.
        num_threads: that the engines keep busy on this machine's CPU.
        budget_s: seconds; rounds, and then sizes, are left out to keep to it (see `sweep`). Two rounds of what a table
            must have are always made.
    """
    limits = target.limits
    requests, depths = request_grid(limits.max_requests), context_grid(limits, gamma)
    slots: tuple[int, ...] = ()
    ingested: tuple[int, ...] = ()
    grid = padded_extra_grid if is_padded else extra_grid
    extras = {count: grid(count, gamma, limits) for count in requests}
    if drafter is not None:
        slots = slot_counts(gamma)
        ingested = ingest_grid(gamma, limits)
    calls: dict[Key, Callable[[], object]] = {}
    for depth in depths:
        for count in requests:
            for extra in extras[count] if depth == depths[0] else _deep(extras[count], count):
                batch = verification_batch(count, count + extra, gamma, depth, limits.max_requests)
                calls["step", depth, count, extra] = partial(_verify, target, acceptance, batch)
            for num_slots in slots:
                assert drafter is not None, "it has slots"
                calls["draft", depth, count, num_slots] = partial(drafter.draft, _block(count, num_slots, depth))
    for num_tokens in ingested:
        assert drafter is not None, "it takes taps"
        calls["ingest", 0, 0, num_tokens] = partial(drafter.ingest, _ingest(target, num_tokens, gamma, depths[0]))

    calls = dict(sorted(calls.items(), key=lambda item: _urgency(item[0])))

    def time_all(chosen: Calls, budget_s: float, progress: Progress) -> dict[Key, Timing]:
        optional = {key for key in chosen if key[0] == "step" and key[3]}
        return sweep(
            chosen,
            progress,
            synchronize=synchronize,
            num_warm_ups=num_warm_ups,
            budget_s=budget_s,
            optional=optional,
        )

    measured, remarks = measure_calls(calls, time_all, num_threads, budget_s, progress)
    extra_tokens = tuple(sorted({extra for kind, *_, extra in measured if kind == "step"}))

    def step_ms(depth: int, count: int, extra: int) -> float | None:
        timing = measured.get(("step", depth, count, extra))
        return timing.ms if timing else None

    return StepTable(
        is_padded=is_padded,
        num_requests=requests,
        context_tokens=depths,
        extra_tokens=extra_tokens,
        step_ms=tuple(
            tuple(tuple(step_ms(depth, count, extra) for extra in extra_tokens) for count in requests)
            for depth in depths
        ),
        num_slots=slots,
        draft_ms=tuple(
            tuple(tuple(measured["draft", depth, count, each].ms for each in slots) for count in requests)
            for depth in depths
        ),
        ingest_tokens=ingested,
        ingest_ms=tuple(measured["ingest", 0, 0, each].ms for each in ingested),
        provenance={**provenance, **remarks},
    )


def measure_calls(
    calls: Calls,
    time_all: Callable[[Calls, float, Progress], dict[Key, Timing]],
    num_threads: int,
    budget_s: float,
    progress: Progress,
) -> tuple[dict[Key, Timing], dict[str, Any]]:
    """Timings of the calls, and what the table says about how they were made."""
    watch, started = LoadWatch(), time.perf_counter()
    measured = time_all(calls, budget_s, progress)
    load = watch.read()
    doubts = doubts_of(measured, load, num_threads)
    num_again, left_s = 0, budget_s - (time.perf_counter() - started)
    share = len(doubts.suspects) / len(calls)
    if doubts.suspects and left_s > share * (time.perf_counter() - started):
        logger.info("the step table is measured again in part: %s", doubts.sentences(load, len(measured)))
        watch, num_again = LoadWatch(), len(doubts.suspects)
        again = time_all({key: calls[key] for key in calls if key in doubts.suspects}, left_s, progress)
        load = watch.read()
        measured = steadier(measured, again)
        doubts = doubts_of(measured, load, num_threads)
    progress(1.0)
    sentences = doubts.sentences(load, len(measured))
    if sentences:
        logger.warning(
            "the step table is doubtful, and drafts may be chosen badly: %s; run `dspark-trt profile DIR` when the "
            "machine is quiet",
            "; ".join(sentences),
        )
    spreads = np.quantile([timing.spread for timing in measured.values()], (0.5, 0.9))
    return measured, {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_sweeps": max(timing.num_repeats for timing in measured.values()),
        "num_calls": len(measured),
        "num_calls_left_out": len(calls) - len(measured),
        "num_calls_measured_again": num_again,
        "spread_of_repeats": {"median": round(float(spreads[0]), 4), "p90": round(float(spreads[1]), 4)},
        "other_work_cores": load.others_cores,
        "load_average": load.load_average,
        "doubts": sentences,
    }


def _urgency(key: Key) -> int:
    """What a budget drops first comes last: sizes between whole numbers of drafts a request, then prompt chunks."""
    kind, _, num_requests, extra = key
    if kind != "step" or extra in (0, num_requests, 3 * num_requests):
        return 0
    return 1 if num_requests == 1 else 2


def _deep(extras: tuple[int, ...], num_requests: int) -> tuple[int, ...]:
    """What is timed again at a deeper context: what depth adds hardly bends with the tokens."""
    return tuple(extra for extra in extras if extra in (0, num_requests, 3 * num_requests))


def _verify(target: TargetEngine, acceptance: AcceptEngine | None, batch: TargetBatch) -> None:
    """What a step asks of the target, up to the outcomes where an engine accepts."""
    output = target.forward(batch)
    if acceptance is not None:
        acceptance.accept(sampled_rows(batch), output.logits, None)()


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
        token_ids=verified.token_ids,
        next_ids=verified.token_ids,
    )
