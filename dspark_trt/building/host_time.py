"""Measures what a step takes outside the engines, by requests: real loops over real engines, drafting and not."""

from __future__ import annotations

import statistics
from dataclasses import replace

from dspark_trt.building.loops import UnpricedLoops
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.steptable.table import StepTable

PROMPT_IDS = (1, 2, 3, 4)
NUM_STEPS = 6
NUM_DRAFTS = 2


def with_host_time(table: StepTable, loops: UnpricedLoops) -> StepTable:
    """The table with host_ms of a plain step and what a step that drafts takes more; 0 without a drafter."""
    plain = [_outside_ms(SchedulerConfig("off"), loops, count) for count in table.num_requests]
    if loops.drafter is None:
        return replace(table, host_ms=tuple(plain), drafting_host_ms=(0.0,) * len(plain))
    drafting = SchedulerConfig("fixed", verify_len=min(NUM_DRAFTS, loops.drafter.gamma))
    whole = [_outside_ms(drafting, loops, count) for count in table.num_requests]
    more = (max(with_drafts - without, 0.0) for with_drafts, without in zip(whole, plain, strict=True))
    return replace(table, host_ms=tuple(plain), drafting_host_ms=tuple(more))


def _outside_ms(scheduler: SchedulerConfig, loops: UnpricedLoops, num_requests: int) -> float:
    """Median milliseconds outside the engines of steps in which so many requests decode."""
    loop = loops(scheduler)
    room = loops.target.limits.max_seq_len - len(PROMPT_IDS)
    sampling = SamplingParams(max_tokens=min((NUM_STEPS + 2) * (NUM_DRAFTS + 1), room))
    for number in range(num_requests):
        request_id = str(number)
        loop.submit(
            GenerationRequest(request_id=request_id, prompt_ids=PROMPT_IDS, sampling=sampling, sequence_index=number)
        )
    times: list[float] = []
    while loop.has_work and len(times) < NUM_STEPS:
        loop.step()
        record = loop.last_step
        if record.num_requests == num_requests and not record.num_prefill_tokens:
            times.append(record.outside_ms)
    return statistics.median(times) if times else 0.0
