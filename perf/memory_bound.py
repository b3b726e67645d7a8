"""How close a one-token step of the float32 target comes to reading its weights once at this machine's memory speed.

    python perf/memory_bound.py build/smollm2

Prints one line and one JSON line. Each round compares steps with the bandwidth measured just before and after them,
since on a shared machine it changes from second to second.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dspark_trt.contract.protocol import TargetBatch
from dspark_trt.deployment import Deployment, load_deployment
from dspark_trt.machine import cpu

STREAM_BYTES = 512 << 20  # far beyond any cache
NUM_ROUNDS = 12
STEPS_PER_ROUND = 20
STEPS_NOT_COUNTED = 4  # at the start of a round: the stream has just emptied the caches and let the threads sleep
CONTEXT_DEPTH_TOKENS = 256


def read_bandwidth(pool: ThreadPoolExecutor, parts: list[np.ndarray]) -> float:
    """Bytes per second of all threads reading a stream once."""
    start = time.perf_counter()
    list(pool.map(np.sum, parts))
    return sum(part.nbytes for part in parts) / (time.perf_counter() - start)


def one_token_batch() -> TargetBatch:
    return TargetBatch(
        token_ids=np.array([5]),
        rows=np.array([0]),
        past_lengths=np.array([CONTEXT_DEPTH_TOKENS]),
        query_lengths=np.array([1]),
        num_decode=1,
        logit_rows=np.array([0]),
    )


def step_bytes(folder: Path) -> int:
    """Bytes that a step has to read: every float32 weight once (a tied head is the embedding),
    and the context's K and V."""
    decoder = json.loads((folder / "checkpoints" / "target.json").read_text())["decoder"]
    hidden, head_dim, num_kv_heads = decoder["hidden_size"], decoder["head_dim"], decoder["num_kv_heads"]
    attention = hidden * head_dim * (2 * decoder["num_heads"] + 2 * num_kv_heads)
    mlp = 3 * hidden * decoder["intermediate_size"]
    context = 2 * num_kv_heads * head_dim * CONTEXT_DEPTH_TOKENS
    return 4 * (decoder["num_layers"] * (attention + mlp + context) + decoder["vocab_size"] * hidden)


def _timed_ms(deployment: Deployment, batch: TargetBatch) -> float:
    start = time.perf_counter()
    deployment.target.forward(batch)
    return (time.perf_counter() - start) * 1e3


def main(folder: Path) -> None:
    deployment = load_deployment(folder)
    if deployment.recipe.precision != "fp32":
        sys.exit(f"{folder} is a {deployment.recipe.precision} build; the bound is defined for fp32")
    num_threads = deployment.recipe.num_threads or cpu.num_cores()
    parts = np.array_split(np.ones(STREAM_BYTES // 4, np.float32), num_threads)
    batch = one_token_batch()
    bandwidths, steps, ratios = [], [], []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(NUM_ROUNDS):
            before = read_bandwidth(pool, parts)
            step_ms = statistics.median(
                [_timed_ms(deployment, batch) for _ in range(STEPS_PER_ROUND)][STEPS_NOT_COUNTED:]
            )
            bandwidth = (before + read_bandwidth(pool, parts)) / 2
            bandwidths.append(bandwidth)
            steps.append(step_ms)
            ratios.append(step_ms / (step_bytes(folder) / bandwidth * 1e3))
    ratio, step_ms = statistics.median(ratios), statistics.median(steps)
    bound_ms = step_bytes(folder) / statistics.median(bandwidths) * 1e3
    result = {
        "step_bytes": step_bytes(folder),
        "bandwidth_gb_per_s": round(statistics.median(bandwidths) / 1e9, 2),
        "bound_ms": round(bound_ms, 2),
        "step_ms": round(step_ms, 2),
        "ratio": round(ratio, 3),
        "ratio_of_rounds": [round(value, 3) for value in sorted(ratios)],
        "num_threads": num_threads,
        "host": cpu.fingerprint(),
    }
    print(
        f"one-token step {step_ms:.1f} ms, memory bound {bound_ms:.1f} ms: {ratio:.2f} x the bound (median of rounds)"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/smollm2"))
