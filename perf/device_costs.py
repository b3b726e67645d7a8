"""What a device engine pays once, and what a step costs that is not the usual one.

    python perf/device_costs.py --output perf/results/device_costs_h200.json
    python perf/device_costs.py --device cpu --size tiny --layers 3        # the same script, looked at without a GPU

On PyTorch sessions of a pair with random weights (perf/device_steps.py): binding and capturing a new bucket, five
prompts that stand in distant rows (each its own target call, since a call spans the rows between), and likely steps
made beforehand. Exit status 3: no such device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from device_steps import make_pair

from dspark_trt.contract.protocol import EngineLimits, TargetBatch
from dspark_trt.engines.device.engines import DeviceEngines
from dspark_trt.engines.device.warm_up import warm_up
from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.reference.on_device import open_device_reference_engines

NUM_PROMPTS = 5
REPEATS = 5


def ms(call: Callable[[], object], engines: DeviceEngines) -> float:
    """Milliseconds of one call until the device has done it."""
    engines.synchronize()
    started = time.perf_counter()
    call()
    engines.synchronize()
    return (time.perf_counter() - started) * 1e3


def plain_step(num_requests: int) -> TargetBatch:
    rows, past = np.arange(num_requests), np.zeros(num_requests, np.int64)
    return TargetBatch(past, rows, past, past + 1, num_requests, rows)


def prompts(rows: list[int], length: int) -> TargetBatch:
    """Whole prompts, of which the logits of the last token are wanted."""
    count = len(rows)
    return TargetBatch(
        token_ids=np.zeros(count * length, np.int64),
        rows=np.array(rows),
        past_lengths=np.zeros(count, np.int64),
        query_lengths=np.full(count, length),
        num_decode=0,
        logit_rows=np.arange(1, count + 1) * length - 1,
    )


def new_buckets(engines: DeviceEngines, most: int) -> list[dict[str, float]]:
    """The first three calls of buckets that nobody has called: bound and run, captured, replayed."""
    names = ("bind_and_run_ms", "capture_and_replay_ms", "replay_ms")
    rows = []
    for count in (1, 2, most):
        batch = plain_step(count)
        times = [ms(lambda batch=batch: engines.target.forward(batch), engines) for _ in names]  # type: ignore[misc]
        rows.append({"num_requests": count, **dict(zip(names, times, strict=True))})
    return rows


def scattered_prompts(engines: DeviceEngines, limits: EngineLimits) -> list[dict[str, float]]:
    """Five prompts in neighbouring rows and in rows that are far from one another."""
    length = limits.max_batch_tokens // NUM_PROMPTS
    apart = np.linspace(0, limits.max_requests - 1, NUM_PROMPTS).astype(int).tolist()
    rows = []
    for where, chosen in (("side by side", list(range(NUM_PROMPTS))), ("apart", apart)):
        batch = prompts(chosen, length)
        times = [ms(lambda batch=batch: engines.target.forward(batch), engines) for _ in range(REPEATS)]  # type: ignore[misc]
        num_calls = len(engines.target.calls(batch))
        rows.append({"rows": where, "target_calls": num_calls, "step_ms": statistics.median(times)})  # type: ignore[dict-item]
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    limits = EngineLimits(options.requests, 512, max(options.requests * 8, 64))
    precision: Any = "bf16" if options.device.startswith("cuda") else "fp32"
    pair = make_pair(options.size, options.layers)
    engines = open_device_reference_engines(*pair, limits=limits, precision=precision, device=options.device)
    buckets = new_buckets(engines, options.requests)
    scattered = scattered_prompts(engines, limits)
    started = time.perf_counter()
    num_calls = warm_up(engines)
    return {
        "device": options.device,
        "layers": options.layers,
        "new_buckets": buckets,
        "prompts": scattered,
        "warm_up": {"calls": num_calls, "seconds": time.perf_counter() - started},
        "steps_after_warm_up_ms": [
            ms(lambda count=count: engines.target.forward(plain_step(count)), engines)  # type: ignore[misc]
            for count in (1, options.requests)
        ],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=["qwen3-0.6b", "tiny"], default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output", type=Path, help="JSON file that gets the figures")
    options = parser.parse_args(arguments)
    try:
        report = measure(options)
    except EnvironmentMissingError as error:
        print(f"device_costs: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(report, indent=1))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
