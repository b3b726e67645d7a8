"""What TensorRT-RTX makes of attention, as the compiler's listing of an engine's layers has it.

The listing is not a measurement. It says which buffers a kernel reads, which is what matters where pools are large and
contexts are short (docs/adr/0007, docs/adr/0017): a pool goes from the node that writes new tokens straight into
RowAttention, and nothing else reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dspark_trt.contract import bindings
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.tensorrt.compiler.build import CompileSettings
from dspark_trt.engines.tensorrt.compiler.graphs import OpenedGraphs, open_graphs
from dspark_trt.engines.tensorrt.compiler.profiles import graph_profiles
from dspark_trt.engines.tensorrt.compiler.scratch import scratch_bytes
from tests.support.factories import write_drafter, write_target
from tests.support.rtx_graphs import ONE_SM, DetailedCompiler, compile_some, export

LIMITS = EngineLimits(max_requests=16, max_seq_len=4032, max_batch_tokens=64)
PAGE = (2, 2, 64, 64)  # keys and values, KV heads, positions, head dim
NUM_LAYERS = 3
HEAD_DIM = 64
GAMMA = 5
PROFILES = {
    bindings.TARGET_GRAPH: ["decode", "verify", "prefill"],
    bindings.INGEST_GRAPH: ["verify", "prefill"],
    bindings.DRAFT_GRAPH: ["draft"],
}
CASES = [(graph, profile) for graph, profiles in PROFILES.items() for profile in profiles]
Tensors = dict[str, tuple[int, ...]]  # shapes by name, -1 where the call decides


@dataclass(frozen=True)
class Layer:
    """One line of the listing: a kernel, what it reads and writes."""

    name: str
    reads: Tensors
    writes: Tensors

    @property
    def is_attention(self) -> bool:
        return "RowAttention" in self.name

    @property
    def is_write(self) -> bool:
        return "PageWrite" in self.name

    def pools(self, tensors: Tensors) -> list[str]:
        """Tensors of the shape of a pool."""
        return [name for name, shape in tensors.items() if shape[1:] == PAGE]


@dataclass(frozen=True)
class Listing:
    """All profiles of an engine, one behind the other."""

    layers: tuple[Layer, ...]
    scratch_bytes: tuple[int, ...]  # of each profile
    planned_bytes: tuple[int, ...]  # before anything was compiled


def listings(messages: list[str], opened: OpenedGraphs) -> dict[str, Listing]:
    """By graph, from the compiler's messages, in which graphs stand in the order of compilation."""
    parts = "\n".join(messages).split("Input filename:")[1:]  # what the parser says first
    result = {}
    for graph, part in zip(PROFILES, parts, strict=True):
        scratch = [int(size) for size in re.findall(r"Max Scratch Memory: (\d+) bytes", part)]
        dims = opened.target if graph == bindings.TARGET_GRAPH else opened.drafter
        profiles = graph_profiles(graph, opened.target, opened.drafter)
        assert [each.name for each in profiles] == PROFILES[graph]
        planned = [scratch_bytes(opened.models[graph], dims, each) for each in profiles]
        result[graph] = Listing(tuple(_layers(part)), tuple(scratch), tuple(planned))
    return result


def _layers(text: str) -> Iterator[Layer]:
    """Kernels; signals and waits read and write nothing."""
    for line in text.splitlines():
        if found := re.match(r"Name: (.+?), LayerType: ", line):
            reads, _, writes = line.partition("Outputs: [")
            if "Dimensions" in line:
                yield Layer(found.group(1), _tensors(reads), _tensors(writes))


def _tensors(text: str) -> Tensors:
    found = re.findall(r"Name: ([^,]+?)(?: \[profile \d+\])?,(?: Location: Device,)? Dimensions: \[([-\d,]*)\]", text)
    return {name: tuple(int(size) for size in sizes.split(",") if size) for name, sizes in found}


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Two query heads for each key head."""
    target = write_target(
        folder / "target", family="qwen3", layers=NUM_LAYERS, hidden=4 * HEAD_DIM, head_dim=HEAD_DIM, max_positions=4096
    )
    return target, write_drafter(folder / "drafter", target, layers=NUM_LAYERS, gamma=GAMMA)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Listing]:
    folder = tmp_path_factory.mktemp("listing")
    pair = export(*write_pair(folder), folder / "graphs", LIMITS, "bf16")
    (folder / "engines").mkdir()
    compiler = DetailedCompiler(CompileSettings("tensorrt_rtx", ONE_SM), folder / "engines")
    compile_some(pair.graphs, compiler, tuple(PROFILES))
    return listings(compiler.log.messages, open_graphs(pair.graphs))


@pytest.mark.parametrize("graph", PROFILES)
def test_pools_go_from_the_node_that_writes_them_straight_into_attention(
    compiled: dict[str, Listing], graph: str
) -> None:
    """Under their own names, which are bound memory and no copies, once for each layer and profile."""
    layers, num_profiles = compiled[graph].layers, len(PROFILES[graph])
    writes = [layer for layer in layers if layer.is_write]
    assert len(writes) == NUM_LAYERS * num_profiles
    for layer in writes:
        (pool,), (written,) = layer.pools(layer.reads), layer.pools(layer.writes)
        assert re.fullmatch(r"kv_cache\.\d+", pool)
        assert written.replace(".out", "") == pool
    attentions = [layer for layer in layers if layer.is_attention]
    assert len(attentions) == (0 if graph == bindings.INGEST_GRAPH else NUM_LAYERS * num_profiles)
    for layer in attentions:
        assert all(re.match(r"kv_cache\.\d+\.out", pool) for pool in layer.pools(layer.reads))
        assert len(layer.pools(layer.reads)) == 1


@pytest.mark.parametrize("graph", PROFILES)
def test_nothing_else_reads_a_pool_and_nothing_of_its_size_is_made(compiled: dict[str, Listing], graph: str) -> None:
    listing = compiled[graph]
    others = [layer for layer in listing.layers if not (layer.is_write or layer.is_attention)]
    assert [layer.name for layer in others if layer.pools(layer.reads) or layer.pools(layer.writes)] == []
    assert not [layer.name for layer in listing.layers if "ShapeHostToDevice" in layer.name], "a copy from the host"


@pytest.mark.parametrize("graph", PROFILES)
def test_scratch_memory_is_within_the_plan(compiled: dict[str, Listing], graph: str) -> None:
    """docs/operations.md has the plan of larger shapes."""
    listing = compiled[graph]
    for found, planned in zip(listing.scratch_bytes, listing.planned_bytes, strict=True):
        assert found <= planned <= found + (64 << 20)
