"""What deciding costs a step: DraftPolicy.choose and PrefixScheduler.choose, without any engine.

    python perf/decision_cost.py                         # a table like that of a two-core host
    python perf/decision_cost.py build/smollm2           # the build's own

A median and the 90th percentile over steps in which every request decodes, 7 slots each. Limits: 60 µs at 64 requests,
400 µs at 512.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.drafter_form import slot_counts
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.machine import cpu
from dspark_trt.runtime.corrections import AcceptanceCorrection, TimeCorrection
from dspark_trt.runtime.draft_choice import Decoding
from dspark_trt.runtime.draft_policy import DraftPolicy
from dspark_trt.runtime.prefix_scheduler import Offer, PrefixScheduler, survival_of
from dspark_trt.runtime.prices import StepPrices
from dspark_trt.runtime.survival_history import SurvivalHistory
from dspark_trt.steptable.table import StepTable

GAMMA = 7
NUM_STEPS = 400
NUM_WARM_UPS = 40
LIMITS_US = {64: 60.0, 512: 400.0}


def realistic_table() -> StepTable:
    """A target that reads its weights once, then pays for every token; a cheap drafter. Milliseconds."""
    counts = tuple(1 << shift for shift in range(10))
    extra = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    return StepTable(
        num_requests=counts,
        extra_tokens=extra,
        step_ms=(tuple(tuple(20.0 + 2.5 * (count + more) for more in extra) for count in counts),),
        draft_ms=(tuple(tuple(2.0 + 0.2 * count * slots for slots in (1, 7)) for count in counts),),
        num_slots=(1, 7),
    )


def measure(table: StepTable, num_requests: int) -> dict[str, float | None]:
    """Microseconds of both decisions of a step."""
    random = np.random.default_rng(0)
    calibration = Calibration.from_temperatures([1.0] * GAMMA)
    prices = StepPrices(table, TimeCorrection())
    expected = calibration.expected_survival
    history = SurvivalHistory(num_rows=num_requests, gamma=GAMMA, prior=calibration.expected_blocks)
    policy = DraftPolicy(prices, history, num_rows=num_requests, slot_counts=slot_counts(GAMMA))
    scheduler = PrefixScheduler(
        SchedulerConfig(mode="early_stop"),
        calibration=calibration,
        history=history,
        acceptance=AcceptanceCorrection(GAMMA),
        expected_survival=expected,
    )
    rows = np.arange(num_requests, dtype=np.int64)
    caps = np.full(num_requests, GAMMA, dtype=np.int64)
    pending = np.ones(num_requests, dtype=np.int64)
    nobody = np.zeros(num_requests, dtype=np.bool_)
    whole, choosing, admitting = [], [], []
    for step in range(NUM_STEPS + NUM_WARM_UPS):
        confidence = random.uniform(0.2, 0.99, size=(num_requests, GAMMA))
        begin = time.perf_counter()
        scheduler.advance()
        policy.choose(
            Decoding(
                rows=rows,
                generations=rows,
                caps=caps,
                num_pending=pending,
                context_tokens=256.0 + step,
            )
        )
        chosen = time.perf_counter()
        last = num_requests * GAMMA
        offer = Offer(
            rows=rows,
            generations=rows,
            caps=caps,
            is_forced=nobody,
            num_requests=num_requests,
            step_ms=prices.plain(num_requests, 256.0 + step, 0, last) + 1.0,
            is_greedy=nobody,
        )
        scheduler.choose(confidence, offer)
        scheduler.record(survival_of(confidence), offer)
        end = time.perf_counter()
        if step >= NUM_WARM_UPS:
            whole.append((end - begin) * 1e6)
            choosing.append((chosen - begin) * 1e6)
            admitting.append((end - chosen) * 1e6)
    return {
        "num_requests": num_requests,
        "median_us": float(np.median(whole)),
        "p90_us": float(np.quantile(whole, 0.9)),
        "draft_policy_us": float(np.median(choosing)),
        "prefix_scheduler_us": float(np.median(admitting)),
        "limit_us": LIMITS_US.get(num_requests),
    }


def main(arguments: list[str]) -> None:
    table = StepTable.load(Path(arguments[0]) / "steptable" / "step_table.json") if arguments else realistic_table()
    rows = [measure(table, num_requests) for num_requests in (1, 8, 64, 512)]
    print(f"{'requests':>8} {'median µs':>10} {'p90 µs':>8} {'who drafts':>11} {'admission':>10} {'limit':>6}")
    for row in rows:
        print(
            f"{row['num_requests']:>8} {row['median_us']:>10.0f} {row['p90_us']:>8.0f} {row['draft_policy_us']:>11.0f} "
            f"{row['prefix_scheduler_us']:>10.0f} {row['limit_us'] or '':>6}"
        )
    print(json.dumps({"rows": rows, "host": cpu.fingerprint()}))


if __name__ == "__main__":
    main(sys.argv[1:])
