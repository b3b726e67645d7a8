"""Graphs for the compile tests, and what TensorRT-RTX has to make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.layout import drafter_shapes, target_shapes
from dspark_trt.checkpoints.spec import DrafterSpec, TargetSpec
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract import bindings
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.tensorrt.compiler.build import CompileSettings, GraphCompiler
from dspark_trt.engines.tensorrt.compiler.facts import EngineFacts, engine_path, read_facts
from dspark_trt.engines.tensorrt.compiler.graphs import open_graphs
from dspark_trt.engines.tensorrt.compiler.profiles import GRAPHS
from dspark_trt.engines.tensorrt.library import BuildLog
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.graphs.select import write_select_graph
from dspark_trt.graphs.target import write_target_graph
from tests.support.factories import write_drafter, write_target

SMS = (80, 86, 89, 120)
ONE_SM = (89,)  # what a graph becomes differs little between architectures, and each takes its time
NATIVE = ("ATTENTION_INPUT", "ATTENTION_OUTPUT", "ROTARY_EMBEDDING")
CACHE_UPDATE = "KV_CACHE_UPDATE"  # of rows
PLUGIN = "PLUGIN_V3"


@dataclass(frozen=True)
class Pair:
    """A target, its drafter and where their graphs stand."""

    target: TargetSpec
    drafter: DrafterSpec
    graphs: Path


def export(target: Path, drafter: Path, graphs: Path, limits: EngineLimits, precision: Precision) -> Pair:
    """Write the graphs as a build for TensorRT does."""
    target_checkpoint = read_target(str(target))
    drafter_checkpoint = read_drafter(str(drafter), target_checkpoint)
    spec = drafter_checkpoint.spec
    graphs.mkdir(parents=True)
    write_target_graph(
        target_checkpoint,
        graphs,
        taps=spec.target_layer_ids,
        norm_last_tap=spec.is_last_tap_normed,
        limits=limits,
        gamma=spec.gamma,
        precision=precision,
        attention="paged",
    )
    write_drafter_graphs(
        target_checkpoint, drafter_checkpoint, graphs, limits=limits, precision=precision, attention="paged"
    )
    write_select_graph(spec, graphs, limits=limits, precision=precision)
    return Pair(target_checkpoint.spec, spec, graphs)


def compile_pair(
    pair: Pair,
    folder: Path,
    *,
    use_plugins: bool,
    names: Sequence[str] = GRAPHS,
    sms: tuple[int, ...] = ONE_SM,
) -> dict[str, EngineFacts]:
    """Compile some graphs with TensorRT-RTX; facts by graph."""
    folder.mkdir(parents=True)
    compile_some(pair.graphs, GraphCompiler(CompileSettings("tensorrt_rtx", sms, use_plugins), folder), names)
    return {graph: read_facts(folder, graph) for graph in names}


def compile_some(graphs: Path, compiler: GraphCompiler, names: Sequence[str]) -> None:
    """As `compile_graphs` compiles all of them."""
    opened = open_graphs(graphs)
    with compiler.plugins([opened.models[graph] for graph in names]):
        for graph in names:
            compiler.compile(opened, graph, lambda fraction: None)


class ListeningLog(BuildLog):
    """Keeps every message, verbose ones too."""

    def __init__(self, trt: Any) -> None:
        super().__init__(trt)
        self.messages: list[str] = []

    def write(self, level: int | None, message: str) -> None:
        self.messages.append(message)
        super().write(level, message)


class DetailedCompiler(GraphCompiler):
    """For looking into an engine: it keeps the names of its layers, and the compiler tells all."""

    log: ListeningLog

    def __init__(self, settings: CompileSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.log = ListeningLog(self.trt)

    def configuration(self, *arguments: Any) -> Any:
        config = super().configuration(*arguments)
        config.profiling_verbosity = self.trt.ProfilingVerbosity.DETAILED
        return config


def expected_layers(pair: Pair, *, use_plugins: bool) -> dict[str, dict[str, int]]:
    """Number of layers by graph and type, of the types that this project counts on."""
    target, drafter = pair.target.decoder.num_layers, pair.drafter.decoder.num_layers

    def layers(attention: int, rotary: int, plugins: int) -> dict[str, int]:
        counts = dict(zip(NATIVE, (attention, attention, rotary), strict=True)) | {PLUGIN: plugins}
        return {name: count for name, count in counts.items() if count}

    # queries and keys rotate together
    if not use_plugins:
        return {
            bindings.TARGET_GRAPH: layers(target, target, 0),
            bindings.INGEST_GRAPH: layers(0, drafter, 0),
            bindings.DRAFT_GRAPH: layers(drafter, drafter, 0),
            bindings.SELECT_GRAPH: {},
        }
    return {
        bindings.TARGET_GRAPH: layers(0, target, 2 * target),
        bindings.INGEST_GRAPH: layers(0, drafter, drafter),
        bindings.DRAFT_GRAPH: layers(0, drafter, 2 * drafter + 1),
        bindings.SELECT_GRAPH: layers(0, 0, 1),
    }


def counted_layers(facts: Mapping[str, EngineFacts]) -> dict[str, dict[str, int]]:
    """Those types of layers, as they were compiled."""
    return {
        graph: {name: count for name, count in sorted(each.layers.items()) if name in (*NATIVE, CACHE_UPDATE, PLUGIN)}
        for graph, each in facts.items()
    }


def write_large_pair(folder: Path) -> tuple[Path, Path]:
    """A target of the shape of Qwen3-0.6B and a drafter as published ones are (gamma 7, rank 256),
    in bfloat16: their folders.

    Small ones are written and widened, with one block of numbers repeated: a compiler does not look at the values, and
    random weights of that size take longer than compiling them.
    """
    small = write_target(folder / "small", family="qwen3", layers=1, heads=16, kv_heads=8, head_dim=8, tied=True)
    small_drafter = write_drafter(folder / "small-drafter", small, taps=(0,), gamma=7, layers=1)
    target, drafter = read_target(str(small)), read_drafter(str(small_drafter), read_target(str(small)))
    sizes = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
    positions = {"max_position_embeddings": 40960}
    target_spec = replace(target.spec, decoder=replace(target.spec.decoder, num_layers=28, **sizes, **positions))
    drafter_spec = replace(
        drafter.spec,
        decoder=replace(drafter.spec.decoder, num_layers=5, **sizes, **positions),
        target_layer_ids=(1, 7, 13, 19, 25),
        markov_rank=256,
    )
    sizes |= positions
    return (
        _write(folder / "target", small, sizes | {"num_hidden_layers": 28}, target_shapes(target_spec), "model."),
        _write(
            folder / "drafter",
            small_drafter,
            sizes
            | {
                "num_hidden_layers": 5,
                "layer_types": ["full_attention"] * 5,
                "num_target_layers": 28,
                "target_layer_ids": list(drafter_spec.target_layer_ids),
                "markov_rank": drafter_spec.markov_rank,
            },
            drafter_shapes(drafter_spec),
        ),
    )


def _write(
    folder: Path, source: Path, changes: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], prefix: str = ""
) -> Path:
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes | {"dtype": "bfloat16"}))
    block = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(ml_dtypes.bfloat16)
    save_file(
        {f"{prefix}{name}": np.resize(block, shape) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    return folder


def check_compiled(facts: Mapping[str, EngineFacts], pair: Pair, folder: Path, *, use_plugins: bool) -> None:
    """Every node became the layer it is meant to be, nothing was warned of, and the engine has code for every GPU."""
    expected = expected_layers(pair, use_plugins=use_plugins)
    assert counted_layers(facts) == {graph: expected[graph] for graph in facts}
    for each in facts.values():  # of bodies some inputs are there for their shapes alone
        said = [warning for warning in each.warnings if use_plugins or "used only at compile-time" not in warning]
        assert said == []
    for graph in facts:
        engine = engine_path(folder, graph).read_bytes()
        assert len(engine) == facts[graph].engine_bytes
        assert all(f"sm{sm}".encode() in engine for sm in facts[graph].sms)
