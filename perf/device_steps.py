"""Step times of the device runtime: a step table excerpt, CUDA graphs against eager calls,
the fused step against three calls.

    python perf/device_steps.py --backend reference --output perf/results/device_steps.json
    python perf/device_steps.py --backend tensorrt                  # or tensorrt_rtx; compiles first

The pair has random weights in the shape of Qwen3-0.6B (`--layers` cuts it, `--size tiny` is for looking at the script
on a CPU with `--device cpu`): times depend on shapes, not on values. With TensorRT the same step is also timed with
rows of a small and of a large capacity and equal live context: they take the same time if attention covers what is live
(docs/adr/0007). Medians of one process. Exit status 3: no such device or package.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_pair import random_pair

from dspark_trt.checkpoints.spec import DecoderSpec, DrafterCheckpoint, RopeSpec, TargetCheckpoint
from dspark_trt.contract.protocol import DraftBatch, EngineLimits, SelectBatch, TargetBatch
from dspark_trt.engines.device.engines import DeviceEngines
from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.reference.on_device import open_device_reference_engines
from dspark_trt.steptable.grid import verification_batch

QWEN3_06B = DecoderSpec(
    num_layers=28,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope=RopeSpec(theta=1000000.0),
    max_position_embeddings=40960,
    has_qk_norm=True,
    has_qkv_bias=False,
    has_o_bias=False,
    has_mlp_bias=False,
)
TINY = replace(
    QWEN3_06B,
    **{"num_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    **{"vocab_size": 300, "max_position_embeddings": 1024},
)
REQUESTS = (1, 8, 32)
DEPTH = 256  # live positions of every row
CAPACITIES = (1024, 8192)
WARM_UPS, TIMED = 3, 20  # the first call of a bucket is eager, the second is captured


def make_pair(size: str, layers: int) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    taps = tuple(sorted({0, layers // 2, layers - 1}))
    if size == "tiny":
        return random_pair(replace(TINY, num_layers=layers), taps=taps, num_drafter_layers=1, markov_rank=8)
    shape = replace(QWEN3_06B, num_layers=layers)
    return random_pair(shape, taps=taps, num_drafter_layers=2, markov_rank=256, element_type="bfloat16")


@contextmanager
def open_pair(
    backend: str, pair: tuple[TargetCheckpoint, DrafterCheckpoint], limits: EngineLimits, device: str
) -> Iterator[DeviceEngines]:
    target, drafter = pair
    if backend == "reference":
        yield _reference(pair, limits, device)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield _compiled(backend, target, drafter, limits, Path(folder))


def _reference(
    pair: tuple[TargetCheckpoint, DrafterCheckpoint], limits: EngineLimits, device: str, *, use_cuda_graphs: bool = True
) -> DeviceEngines:
    precision: Any = "bf16" if device.startswith("cuda") else "fp32"
    options: dict[str, Any] = {"limits": limits, "precision": precision, "device": device}
    return open_device_reference_engines(*pair, **options, use_cuda_graphs=use_cuda_graphs)


def _compiled(
    backend: Any, target: TargetCheckpoint, drafter: DrafterCheckpoint, limits: EngineLimits, build: Path
) -> DeviceEngines:
    from dspark_trt.engines.settings import EngineSettings
    from dspark_trt.engines.tensorrt.compiler.build import CompileSettings, compile_graphs
    from dspark_trt.engines.tensorrt.engines import open_tensorrt_engines
    from dspark_trt.graphs.drafter import write_drafter_graphs
    from dspark_trt.graphs.select import write_select_graph
    from dspark_trt.graphs.target import write_target_graph

    graphs, engines = build / "graphs", build / "engines"
    graphs.mkdir()
    engines.mkdir()
    common: dict[str, Any] = {"limits": limits, "precision": "bf16"}
    spec = drafter.spec
    taps: dict[str, Any] = {"taps": spec.target_layer_ids, "norm_last_tap": spec.is_last_tap_normed}
    write_target_graph(target, graphs, **taps, gamma=spec.gamma, attention="paged", **common)
    write_drafter_graphs(target, drafter, graphs, attention="paged", **common)
    write_select_graph(drafter.spec, graphs, **common)
    compile_graphs(graphs, engines, CompileSettings(backend))
    return open_tensorrt_engines(build, EngineSettings(backend=backend))


def median_ms(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    times = []
    for index in range(WARM_UPS + TIMED):
        started = time.perf_counter()
        call()
        synchronize()
        if index >= WARM_UPS:
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def step_rows(engines: DeviceEngines, requests: tuple[int, ...]) -> list[dict[str, float]]:
    """For each number of requests: a plain step, full verification, a draft block,
    and both ways to half of the drafts."""
    gamma, most = engines.drafter.gamma, engines.target.limits.max_requests
    rows = []
    for count in requests:
        plain = verification_batch(count, count, gamma, DEPTH, most)
        full = verification_batch(count, count * (1 + gamma), gamma, DEPTH, most)
        half = verification_batch(count, count + count * gamma // 2, gamma, DEPTH, most)
        block = _block(count, gamma)
        select = SelectBatch(
            num_admitted=count * gamma // 2,
            caps=np.full(count, gamma, np.int64),
            is_forced=np.zeros(count, np.bool_),
            temperatures=np.ones(gamma, np.float32),
        )

        def apart(block: DraftBatch = block, half: Any = half) -> None:
            engines.drafter.draft(block).draft_ids.cpu()  # what the host needs to choose and to pack
            engines.target.forward(half)

        def fused(block: DraftBatch = block, select: SelectBatch = select, plain: Any = plain) -> None:
            engines.step.draft_and_verify(block, select, plain).wait()

        calls: dict[str, Callable[[], object]] = {
            "plain_step_ms": lambda plain=plain: engines.target.forward(plain),  # type: ignore[misc]
            "full_verification_ms": lambda full=full: engines.target.forward(full),  # type: ignore[misc]
            "draft_block_ms": lambda block=block: engines.drafter.draft(block),  # type: ignore[misc]
            "draft_then_verify_ms": apart,
            "fused_step_ms": fused,
        }
        rows.append({"num_requests": count} | {n: median_ms(c, engines.synchronize) for n, c in calls.items()})
    return rows


def _block(count: int, gamma: int) -> DraftBatch:
    rows = np.arange(count, dtype=np.int64)
    return DraftBatch(
        rows=rows,
        anchor_ids=rows % 97,
        past_lengths=np.full(count, DEPTH, np.int64),
        temperatures=np.zeros(count, np.float32),
        uniforms=np.zeros((count, gamma), np.float32),
    )


def capacity_rows(backend: str, size: str, limits: EngineLimits, device: str, count: int) -> list[dict[str, float]]:
    """The same step over rows of different capacity; a few layers, since only attention could differ."""
    rows, pair = [], make_pair(size, layers=4)
    for max_seq_len in CAPACITIES:
        with open_pair(backend, pair, replace(limits, max_seq_len=max_seq_len), device) as engines:
            batch = verification_batch(count, count, engines.drafter.gamma, DEPTH, limits.max_requests)

            def step(engines: DeviceEngines = engines, batch: TargetBatch = batch) -> object:
                return engines.target.forward(batch)

            ms = median_ms(step, engines.synchronize)
            rows.append({"max_seq_len": max_seq_len, "num_requests": count, "step_ms": ms})
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    requests = tuple(count for count in REQUESTS if count <= options.requests)
    limits = EngineLimits(options.requests, 512, max(options.requests * 8, 64))
    pair = make_pair(options.size, options.layers)
    with open_pair(options.backend, pair, limits, options.device) as engines:
        report: dict[str, Any] = {"backend": options.backend, "device": options.device, "layers": options.layers}
        report["steps"] = step_rows(engines, requests)
    if options.backend == "reference":
        eager = _reference(pair, limits, options.device, use_cuda_graphs=False)
        report["steps_without_cuda_graphs"] = step_rows(eager, requests)
    if options.backend != "reference":
        report["capacity"] = capacity_rows(options.backend, options.size, limits, options.device, requests[-1])
    return report


def table(rows: list[dict[str, float]]) -> str:
    names = list(rows[0])
    lines = ["".join(f"{name:>23}" for name in names)]
    lines += ["".join(f"{row[n]:23.3f}" if n.endswith("_ms") else f"{row[n]:23}" for n in names) for row in rows]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["reference", "tensorrt", "tensorrt_rtx"], default="reference")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=["qwen3-0.6b", "tiny"], default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output", type=Path, help="JSON file that gets the tables")
    options = parser.parse_args(arguments)
    try:
        report = measure(options)
    except EnvironmentMissingError as error:
        print(f"device_steps: {error}", file=sys.stderr)
        return error.exit_code
    report["device_name"] = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    print(
        f"{report['device_name']}, {options.backend}, {options.size} of {options.layers} layers, {DEPTH} live "
        "positions a row"
    )
    for name in ("steps", "steps_without_cuda_graphs", "capacity"):
        if name in report:
            print(f"{name}\n{table(report[name])}")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
