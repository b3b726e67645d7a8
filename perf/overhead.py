"""The time of a step outside the two engines: greedy and sampled, at one request and at 16.

    python perf/overhead.py build/smollm2

The engines are wrapped by timers here, so the figure does not depend on what the loop says of itself. Only steps in
which every request decodes are counted (no admission, no prefill).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.deployment import Deployment, load_deployment
from dspark_trt.machine import cpu
from dspark_trt.runtime.request import GenerationRequest, SamplingParams

PROMPT = "Write a short story about a lighthouse keeper who finds a map."
NUM_TOKENS = 96
SETTINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.7, "top_p": 0.9}}
LIMITS = {"greedy": 0.10, "sampled": 0.25}


class Timed:
    """An engine whose calls add up their own time."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._engine, name)
        if name not in ("forward", "ingest", "draft"):
            return attribute

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return attribute(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def measure(deployment: Deployment, num_requests: int, setting: str, mode: str) -> dict[str, Any]:
    target, drafter = Timed(deployment.target), Timed(deployment.drafter)
    loop = deployment.make_loop(
        parse_scheduler(mode), target=target, drafter=None if deployment.drafter is None else drafter
    )
    prompt = tuple(deployment.codec.encode_chat([{"role": "user", "content": PROMPT}]))
    for index in range(num_requests):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=index, ignore_eos=True, **SETTINGS[setting])
        loop.submit(GenerationRequest(request_id=str(index), prompt_ids=prompt, sampling=sampling))
    shares, steps, outside = [], [], []
    while loop.has_work:
        before = target.seconds + drafter.seconds
        start = time.perf_counter()
        emissions = loop.step()
        total = time.perf_counter() - start
        if len(emissions) == num_requests and all(emission.finish_reason is None for emission in emissions):
            rest = total - (target.seconds + drafter.seconds - before)
            shares.append(rest / total)
            steps.append(total * 1e3)
            outside.append(rest * 1e3)
    return {
        "requests": num_requests,
        "setting": setting,
        "mode": mode,
        "steps": len(steps),
        "step_ms": round(statistics.median(steps), 2),
        "outside_ms": round(statistics.median(outside), 2),
        "outside_share": round(statistics.median(shares), 4),
        "limit": LIMITS[setting],
    }


def main(folder: Path) -> None:
    deployment = load_deployment(folder)
    rows = [
        measure(deployment, num_requests, setting, mode)
        for mode in ("off", "early_stop", "lagged_budget", "auto")
        for setting in SETTINGS
        for num_requests in (1, min(16, deployment.recipe.max_requests))
    ]
    print(
        f"{'mode':<14} {'setting':<8} {'requests':>8} {'steps':>6} {'step ms':>8} {'outside':>8} {'share':>7} "
        f"{'limit':>6}"
    )
    for row in rows:
        print(
            f"{row['mode']:<14} {row['setting']:<8} {row['requests']:>8} {row['steps']:>6} {row['step_ms']:>8.1f} "
            f"{row['outside_ms']:>8.2f} {row['outside_share']:>7.1%} {row['limit']:>6.0%}"
        )
    print(json.dumps({"rows": rows, "host": cpu.fingerprint()}))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/smollm2"))
