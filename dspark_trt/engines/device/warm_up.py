"""Likely steps made once before the first request, so that no client waits for a bucket to be bound and captured.

What is written lies at the beginning of rows, which are cleared when a request begins in them (DeviceCache.prepare).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dspark_trt.contract.protocol import DraftBatch, EngineLimits, IngestBatch, SelectBatch, TargetBatch
from dspark_trt.engines.device.buckets import bucket
from dspark_trt.engines.device.engines import DeviceEngines
from dspark_trt.log import get_logger

logger = get_logger(__name__)

NUM_CALLS = 2  # of each bucket: the first binds it and runs it as it is, the second records its graph
_SHARES = (0.5, 1.0)  # of the drafts of a step that are verified


def likely_requests(limits: EngineLimits) -> Iterator[int]:
    """Numbers of requests that have a bucket of their own, falling: the largest memory is taken first."""
    sizes = {bucket(count, limits.max_requests) for count in range(1, limits.max_requests + 1)}
    yield from sorted((size for size in sizes if size == limits.max_requests or size & (size - 1) == 0), reverse=True)


def warm_up(engines: DeviceEngines) -> int:
    """Plain, drafted and ingested steps of likely sizes; how many calls of target and drafter that were.

    Raises EngineBuildError when the backend fails.
    """
    started, num_calls = time.perf_counter(), 0
    limits, gamma = engines.target.limits, engines.drafter.gamma
    for count in likely_requests(limits):
        rows, past = np.arange(count), np.zeros(count, np.int64)
        plain = TargetBatch(past, rows, past, past + 1, count, rows)
        draft = DraftBatch(rows, past, past, np.zeros(count, np.float32), np.zeros((count, gamma), np.float32))
        for _ in range(NUM_CALLS):
            engines.target.forward(plain)
            num_calls += 1
            for num_admitted in sorted({int(share * count * gamma) for share in _SHARES}):
                if count + num_admitted > limits.max_batch_tokens:
                    continue
                select = SelectBatch(
                    num_admitted, np.full(count, gamma), np.zeros(count, np.bool_), np.ones(gamma, np.float32)
                )
                verified = engines.step.draft_and_verify(draft, select, plain)
                verified.wait()
                num_calls += 2
            for per_row in (1, gamma + 1):
                if count * per_row <= limits.max_batch_tokens:
                    taps = np.zeros((count * per_row, engines.drafter.dims.tap_width), np.float32)
                    ids = np.zeros(count * per_row, np.int64)
                    committed = IngestBatch(taps, rows, past, past + per_row, ids, ids)
                    engines.drafter.draft(replace(draft, past_lengths=past + per_row), committed)
                    num_calls += 2
    engines.synchronize()
    logger.info("%d calls of likely sizes were made beforehand in %.1f s", num_calls, time.perf_counter() - started)
    return num_calls
