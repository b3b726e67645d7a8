"""A small pair as TensorRT engines and as PyTorch sessions of the same precision, and calls of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_trt.engines.settings import ENGINE_FOLDER
from dspark_trt.engines.tensorrt.compiler.build import CompileSettings, compile_graphs
from dspark_trt.engines.tensorrt.compiler.facts import engine_path
from dspark_trt.engines.tensorrt.compiler.profiles import GRAPHS
from dspark_trt.engines.tensorrt.library import LIBRARIES, Library
from dspark_trt.engines.tensorrt.runtime import TensorRTRuntime
from dspark_trt.engines.tensorrt.session import TensorRTSession
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.graphs.select import write_select_graph
from dspark_trt.graphs.target import write_target_graph
from dspark_trt.reference.on_device import ReferenceSessions, open_reference_sessions
from tests.support.device_cases import LIMITS, Pair, make_pair
from tests.support.session_calls import (
    Lengths,
    Poison,
    Tensors,
    caches_of,
    copied,
    draft_call,
    held,
    ingest_call,
    target_call,
)

DEVICE = "cuda"
RELATIVE_ERROR = 0.05  # root mean square of the difference of two bfloat16 computations
POISONS = (Poison(0.0, 0, 0), Poison(3e3, 7, 4))
ROWS: tuple[Lengths, ...] = ((0, 0), (17, 3), (90, 1), (4, 6))
IDLE: tuple[Lengths, ...] = ((0, 0),)
CHUNKS: tuple[Lengths, ...] = ((0, 9), (12, 2))
CONTEXT: tuple[Lengths, ...] = ((5, 4), (0, 0), (0, 7), (40, 8))


@dataclass(frozen=True)
class Compiled:
    """A pair whose heads and rows have sizes that the compilers have attention kernels for."""

    pair: Pair
    build: Path
    runtime: TensorRTRuntime
    sessions: dict[str, TensorRTSession]
    reference: ReferenceSessions


def compile_pair(build: Path, library: Library, sm: int) -> Compiled:
    """Write the graphs, compile them for this GPU and open the engines."""
    sizes = {"hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 3}
    pair = make_pair(
        build,
        target={**sizes, "vocab_size": 16},
        drafter={"layers": 2, "taps": (0, 2), "head_type": "gated", "seed": 8},
    )
    graphs, engines = build / "graphs", build / ENGINE_FOLDER
    for folder in (graphs, engines):
        folder.mkdir()
    common: dict[str, Any] = {"limits": LIMITS, "precision": "bf16"}
    spec = pair.drafter.spec
    taps = {"taps": spec.target_layer_ids, "norm_last_tap": spec.is_last_tap_normed}
    write_target_graph(pair.target, graphs, **taps, gamma=pair.gamma, attention="paged", **common)
    write_drafter_graphs(pair.target, pair.drafter, graphs, attention="paged", **common)
    write_select_graph(pair.drafter.spec, graphs, **common)
    sms = (sm,) if LIBRARIES[library].takes_sms else ()
    compile_graphs(graphs, engines, CompileSettings(library, sms=sms))
    runtime = TensorRTRuntime(library, DEVICE)
    sessions = {graph: TensorRTSession(engine_path(engines, graph), runtime) for graph in GRAPHS}
    reference = open_reference_sessions(pair.target, pair.drafter, device=DEVICE, **common)
    return Compiled(pair, build, runtime, sessions, reference)


def verification(compiled: Compiled, poison: Poison = POISONS[1]) -> Tensors:
    """Rows of 0 to 91 positions that verify up to a whole block."""
    dims = compiled.reference.target_dims
    return copied(target_call(dims, ROWS, IDLE, num_tokens=16, num_queries=(6, 1), poison=poison), device=DEVICE)


def prefill(compiled: Compiled, poison: Poison = POISONS[1]) -> Tensors:
    """Chunks of prompts beside rows that verify."""
    dims = compiled.reference.target_dims
    return copied(target_call(dims, ROWS, CHUNKS, num_tokens=32, num_queries=(6, 10), poison=poison), device=DEVICE)


def ingestion(compiled: Compiled, poison: Poison = POISONS[1]) -> Tensors:
    dims = compiled.reference.drafter_dims
    return copied(ingest_call(dims, CONTEXT, num_tokens=32, num_queries=8, poison=poison), device=DEVICE)


def drafting(compiled: Compiled, poison: Poison = POISONS[1]) -> Tensors:
    dims = compiled.reference.drafter_dims
    call = draft_call(dims, (9, 43, 1), (0.0, 0.8, 1.3), poison=poison)
    return copied(call, device=DEVICE)


def num_tokens(rows: Sequence[Lengths]) -> int:
    return sum(query for _, query in rows)


def assert_near(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.isfinite().all(), what
    error = (found.float() - expected.float()).square().mean().sqrt() / expected.float().square().mean().sqrt()
    assert error < RELATIVE_ERROR, f"{what}: {error}"


def assert_same_caches(found: Tensors, expected: Tensors, tables: torch.Tensor, rows: Sequence[Lengths]) -> None:
    """What was valid keeps its bits; what was written is near. `tables` [B, W] of the rows."""
    for name in caches_of(expected):
        for row, (past, query) in enumerate(rows):
            one, other = (held(each[name], tables[row], past + query) for each in (found, expected))
            assert torch.equal(one[:, :, :past], other[:, :, :past]), f"{name} row {row}"
            if query:
                assert_near(one[:, :, past:], other[:, :, past:], f"{name} row {row}")
