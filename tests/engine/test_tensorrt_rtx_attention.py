"""What TensorRT-RTX makes of attention, as the compiler's listing of an engine's layers has it.

The listing is not a measurement. It says which buffers a kernel reads, which is what matters where capacity is long and
contexts are short (docs/adr/0007): caches go from the native update straight into RowAttention, and nothing else reads
them.
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
from tests.support.rtx_graphs import SMS, DetailedCompiler, compile_some, export

LIMITS = EngineLimits(max_requests=16, max_seq_len=4032, max_batch_tokens=64)
CAPACITY = LIMITS.max_seq_len + LIMITS.max_batch_tokens
NUM_LAYERS = 3
KV_HEADS, HEAD_DIM = 2, 64
GAMMA = 5
PROFILES = {
    graph: [profile.name for profile in graph_profiles(graph, LIMITS, GAMMA)]
    for graph in (bindings.TARGET_GRAPH, bindings.DRAFT_GRAPH)
}
GROUPS = {bindings.TARGET_GRAPH: bindings.TARGET_GROUPS, bindings.DRAFT_GRAPH: (bindings.CONTEXT,)}
CASES = [(graph, profile) for graph, profiles in PROFILES.items() for profile in profiles]
Tensors = dict[str, tuple[int, ...]]  # shapes by name, -1 where the call decides


@dataclass(frozen=True)
class Layer:
    """One line of the listing: a kernel, what it reads and writes."""

    name: str
    reads: Tensors
    writes: Tensors

    @property
    def is_plugin(self) -> bool:
        return "RowAttention" in self.name

    @property
    def profile(self) -> int:
        """Its number stands behind the node's name."""
        found = re.search(r"_myl(\d+)_\d+$", self.name)
        assert found is not None, self.name
        return int(found.group(1))

    def caches(self, group: str) -> Tensors:
        """Caches of a row group that it reads under their own names, which are bound memory and no copies."""
        return {name: shape for name, shape in self.reads.items() if re.match(rf"{group}\.\w+_cache\.", name)}

    @property
    def is_update(self) -> bool:
        """It writes every cache that it reads: new tokens enter."""
        return {name for name in self.reads if "_cache." in name} <= self.writes.keys()

    @property
    def copies(self) -> list[str]:
        """What it writes of the size of a cache and is none."""
        return [
            name
            for name, shape in self.writes.items()
            if "_cache." not in name and CAPACITY in shape and HEAD_DIM in shape
        ]


@dataclass(frozen=True)
class Listing:
    """One profile of an engine."""

    layers: tuple[Layer, ...]
    scratch_bytes: int
    planned_bytes: int  # before anything was compiled


Listings = dict[tuple[str, str], Listing]  # by graph and profile


def listings(messages: list[str], opened: OpenedGraphs) -> Listings:
    """From the compiler's messages, in which graphs stand in the order of compilation."""
    parts = "\n".join(messages).split("Input filename:")[1:]  # what the parser says first
    result = {}
    for (graph, profiles), part in zip(PROFILES.items(), parts, strict=True):
        layers = tuple(_layers(part))
        scratch = [int(size) for size in re.findall(r"Max Scratch Memory: (\d+) bytes", part)]
        dims = opened.target if graph == bindings.TARGET_GRAPH else opened.drafter
        planned = [scratch_bytes(opened.models[graph], dims, each) for each in graph_profiles(graph, LIMITS, GAMMA)]
        for index, (profile, size, plan) in enumerate(zip(profiles, scratch, planned, strict=True)):
            of_profile = tuple(layer for layer in layers if layer.profile == index)
            result[graph, profile] = Listing(of_profile, size, plan)
    return result


def _layers(text: str) -> Iterator[Layer]:
    """Kernels; signals and waits read and write nothing."""
    for line in text.splitlines():
        if found := re.match(r"Name: (.+?), LayerType: ", line):
            reads, _, writes = line.partition("Outputs: [")
            if "Dimensions" in line:
                yield Layer(found.group(1), _tensors(reads), _tensors(writes))


def _tensors(text: str) -> Tensors:
    found = re.findall(r"Name: ([^,]+?)(?: \[profile \d+\])?, Dimensions: \[([-\d,]*)\]", text)
    return {name: tuple(int(size) for size in sizes.split(",") if size) for name, sizes in found}


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Two query heads for each key head."""
    target = write_target(
        folder / "target", family="qwen3", layers=NUM_LAYERS, hidden=4 * HEAD_DIM, head_dim=HEAD_DIM, max_positions=4096
    )
    return target, write_drafter(folder / "drafter", target, layers=NUM_LAYERS, gamma=GAMMA)


@pytest.fixture(scope="module", params=[(80,), (120,), SMS], ids=lambda sms: "-".join(map(str, sms)))
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Listings:
    """For the oldest and the newest GPU alone, and for all in one engine, which the compiler makes alike for all."""
    folder = tmp_path_factory.mktemp("listing")
    pair = export(*write_pair(folder), folder / "graphs", LIMITS, "bf16")
    (folder / "engines").mkdir()
    compiler = DetailedCompiler(CompileSettings("tensorrt_rtx", request.param), folder / "engines")
    compile_some(pair.graphs, compiler, tuple(PROFILES))
    return listings(compiler.log.messages, open_graphs(pair.graphs))


@pytest.mark.parametrize(("graph", "profile"), CASES)
def test_the_plugin_reads_the_bound_caches(compiled: Listings, graph: str, profile: str) -> None:
    plugins = [layer for layer in compiled[graph, profile].layers if layer.is_plugin]
    for group in GROUPS[graph]:
        read = [layer.caches(group) for layer in plugins if layer.caches(group)]
        assert [list(caches) for caches in read] == [
            [bindings.cache_output(name(group, layer)) for name in (bindings.key_cache, bindings.value_cache)]
            for layer in range(NUM_LAYERS)
        ]
        assert {shape[1:] for caches in read for shape in caches.values()} == {(KV_HEADS, CAPACITY, HEAD_DIM)}
    assert len(plugins) == NUM_LAYERS * len(GROUPS[graph])


@pytest.mark.parametrize(("graph", "profile"), CASES)
def test_nothing_else_reads_them_but_the_update_and_nothing_is_copied(
    compiled: Listings, graph: str, profile: str
) -> None:
    listing = compiled[graph, profile]
    others = [layer for layer in listing.layers if not layer.is_plugin]
    for group in GROUPS[graph]:
        readers = [layer for layer in others if layer.caches(group)]
        updated = [name for layer in readers for name in layer.caches(group)]
        assert all(layer.is_update for layer in readers)
        assert len(updated) == len(set(updated)) == 2 * NUM_LAYERS, "each cache once"
    assert [layer.name for layer in listing.layers if layer.copies] == []
    keys_of_a_layer = LIMITS.max_requests * KV_HEADS * CAPACITY * HEAD_DIM * 2
    assert listing.scratch_bytes < keys_of_a_layer  # 8 MB of it are for matrix products


@pytest.mark.parametrize(("graph", "profile"), CASES)
def test_scratch_memory_is_within_the_plan(compiled: Listings, graph: str, profile: str) -> None:
    """docs/operations.md has the plan of larger shapes."""
    listing = compiled[graph, profile]
    assert listing.scratch_bytes <= listing.planned_bytes <= listing.scratch_bytes + (64 << 20)
