"""What the graphs of two builds cost on this CPU: target steps, and draft blocks with their ingest.

    python perf/compare_graphs.py build/before build/after [--threads 2] [--rounds 15]

CPU time of the process does not see the turns that other programs take, wall time is what a request sees. Prints one
line for each size: the lower quartiles of both builds and their ratio. Caches hold zeros.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, drafter_dims_from_metadata
from dspark_trt.contract.protocol import DraftBatch, EngineLimits, IngestBatch, TargetBatch
from dspark_trt.engines.onnxruntime.drafter import OnnxRuntimeDraftEngine
from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeSettings, OnnxRuntimeTargetEngine
from dspark_trt.steptable.grid import verification_batch

STEPS = [(requests, extra) for requests in (1, 8, 32) for extra in (0, requests, 3 * requests)]
BLOCKS = [(requests, slots) for requests in (1, 8, 32) for slots in (1, 2, 3, 7)]
DEPTHS = (64, 256, 1024, 4096)
MAX_POSITIONS = 32 * 1024  # of all requests: memory of the caches


def spread(requests: int, depth: int, limits: EngineLimits) -> np.ndarray:
    """Past lengths around `depth`: requests that serve are of different lengths."""
    lengths = np.linspace(0.75, 1.25, requests) * depth if requests > 1 else np.array([depth])
    return np.minimum(lengths.astype(np.int64), limits.max_seq_len - 16)


def step(requests: int, extra: int, depth: int, limits: EngineLimits) -> TargetBatch:
    batch = verification_batch(requests, requests + extra, 7, depth, limits.max_requests)
    return replace(batch, past_lengths=spread(requests, depth, limits))


def block(requests: int, slots: int, depth: int, dims: DrafterDims) -> tuple[DraftBatch, IngestBatch]:
    """A block, and the last position of each request's context, which a step that drafts brings up before it."""
    rows, past = np.arange(requests), spread(requests, depth, dims.limits)
    uniforms = np.zeros((requests, slots), np.float32)
    drafted = DraftBatch(rows, rows % 97, past, np.zeros(requests, np.float32), uniforms, wants_logits=False)
    taps, ones = np.zeros((requests, dims.tap_width), np.float32), np.ones(requests, np.int64)
    return drafted, IngestBatch(taps, rows, past - 1, ones, rows % 89, rows % 97)


def drafter_dims(folder: Path) -> DrafterDims:
    graph = onnx.load(folder / bindings.DRAFT_GRAPH, load_external_data=False)
    return drafter_dims_from_metadata({entry.key: entry.value for entry in graph.metadata_props}, str(folder))


def sizes(kind: str, pairs: list[tuple[int, int]], limits: EngineLimits) -> Iterator[tuple[str, int, int, int]]:
    """Name, requests, tokens more or slots, and depth of what fits the limits."""
    for requests, count in pairs:
        for depth in DEPTHS:
            if requests <= limits.max_requests and requests * depth <= MAX_POSITIONS:
                yield f"{kind:5s} {requests:3d} requests {depth:5d} deep {count:3d}", requests, count, depth


def compare(name: str, calls: Sequence[Callable[[], Any]], rounds: int) -> None:
    for call in calls:
        call()
    times: list[list[tuple[float, float]]] = [[] for _ in calls]
    for _ in range(rounds):
        for of_call, call in zip(times, calls, strict=True):
            cpu, wall = time.process_time(), time.perf_counter()
            call()
            of_call.append((time.process_time() - cpu, time.perf_counter() - wall))
    text = name
    for which, unit in enumerate(("CPU", "wall")):
        before, after = (np.quantile([each[which] for each in of_call], 0.25) * 1e3 for of_call in times)
        text += f"  {unit} {before:8.2f} -> {after:8.2f} ms  x {after / before:4.2f}"
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("builds", type=Path, nargs=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["target", "drafter"])
    given = parser.parse_args()
    settings = OnnxRuntimeSettings(given.threads)
    folders = [folder / "graphs" if (folder / "graphs").exists() else folder for folder in given.builds]
    if given.only != "drafter":
        targets = [OnnxRuntimeTargetEngine(folder, settings) for folder in folders]
        for name, requests, extra, depth in sizes("step", STEPS, targets[0].limits):
            batch = step(requests, extra, depth, targets[0].limits)
            compare(f"{name} more", [partial(target.forward, batch) for target in targets], given.rounds)
        del targets
    if given.only != "target":
        drafters = [OnnxRuntimeDraftEngine(folder, settings) for folder in folders]
        dims = drafter_dims(folders[0])
        for name, requests, slots, depth in sizes("draft", BLOCKS, dims.limits):
            wanted = block(requests, slots, depth, dims)
            compare(f"{name} slots", [partial(drafter.draft, *wanted) for drafter in drafters], given.rounds)


if __name__ == "__main__":
    main()
