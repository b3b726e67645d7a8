"""Does a step cost more when rows have room for more positions? Every form of attention at row capacities 512 and 8192.

    python perf/attention_capacity.py

Random weights, layer shapes of SmolLM2-135M, four requests with 256 live positions in both cases. `gqa` and `drafter`
should stay near 1; `standard` is TensorRT's form and only a check on ONNX Runtime, where it costs O(capacity).
Prints one line per form and one JSON line.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from random_pair import random_pair

from dspark_trt.checkpoints.spec import DecoderSpec, RopeSpec
from dspark_trt.contract.dims import Attention
from dspark_trt.contract.protocol import DraftBatch, EngineLimits, TargetBatch
from dspark_trt.engines.onnxruntime.engines import open_engines
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.graphs.target import write_target_graph

CAPACITIES = (512, 8192)
NUM_REQUESTS = 4
LIVE_POSITIONS = 256
NUM_ROUNDS = 15
TAPS = (1, 4)
GAMMA = 7
MAX_BATCH_TOKENS = 64
DECODER = DecoderSpec(
    num_layers=6,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=8192,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=100000.0),
    max_position_embeddings=2 * max(CAPACITIES),
    has_qk_norm=False,
    has_qkv_bias=False,
    has_o_bias=False,
    has_mlp_bias=False,
)


def calls(folder: Path, capacity: int, is_standard: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A verification step and a draft block on engines whose target rows have `capacity` positions."""
    target, drafter = random_pair(
        DECODER, taps=TAPS, num_drafter_layers=DECODER.num_layers, markov_rank=64, gamma=GAMMA
    )
    limits = EngineLimits(NUM_REQUESTS, capacity - MAX_BATCH_TOKENS, MAX_BATCH_TOKENS)
    forms: tuple[Attention, Attention] = ("standard", "standard") if is_standard else ("gqa", "drafter")
    write_target_graph(target, folder, taps=TAPS, limits=limits, gamma=GAMMA, precision="fp32", attention=forms[0])
    write_drafter_graphs(target, drafter, folder, limits=limits, precision="fp32", attention=forms[1])
    target_engine, draft_engine = open_engines(folder)
    rows, past = np.arange(NUM_REQUESTS), np.full(NUM_REQUESTS, LIVE_POSITIONS)
    step = TargetBatch(rows, rows, past, np.ones(NUM_REQUESTS, np.int64), NUM_REQUESTS, rows)
    block = DraftBatch(
        rows, rows, past, np.zeros(NUM_REQUESTS, np.float32), np.zeros((NUM_REQUESTS, GAMMA), np.float32)
    )
    return lambda: target_engine.forward(step), lambda: draft_engine.draft(block)


def main() -> None:
    timed: dict[tuple[str, int], Callable[[], Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for is_standard in (False, True):
            for capacity in CAPACITIES:
                folder = Path(scratch) / f"{is_standard}-{capacity}"
                folder.mkdir()
                step, block = calls(folder, capacity, is_standard)
                names = ("standard, target", "standard, drafter") if is_standard else ("gqa", "drafter")
                timed[names[0], capacity], timed[names[1], capacity] = step, block
        times: dict[tuple[str, int], list[float]] = {key: [] for key in timed}
        for _ in range(NUM_ROUNDS):
            for key, call in timed.items():
                call()
                start = time.perf_counter()
                call()
                times[key].append((time.perf_counter() - start) * 1e3)
    result = {}
    for name in dict.fromkeys(name for name, _ in timed):
        short, long = (statistics.median(times[name, capacity]) for capacity in CAPACITIES)
        result[name] = {"short_ms": round(short, 2), "long_ms": round(long, 2), "ratio": round(long / short, 2)}
        print(
            f"{name:18s} {short:7.2f} ms at {CAPACITIES[0]}, {long:7.2f} ms at {CAPACITIES[1]}: {long / short:5.2f} x"
        )
    print(json.dumps({"capacities": CAPACITIES, "live_positions": LIVE_POSITIONS, "forms": result}))


if __name__ == "__main__":
    main()
