"""How TensorRT-RTX attends, as the compiler's listing of an engine's layers has it.

The listing is not a measurement. It says which buffers a kernel reads, which is what matters where capacity is long and
contexts are short (docs/adr/0007).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dspark_trt import bindings
from dspark_trt.engines.protocol import EngineLimits
from tests.factories import write_drafter, write_target
from tests.rtx_graphs import compile_pair, export

LIMITS = EngineLimits(max_slots=4, max_seq_len=960, max_batch_tokens=64)
CAPACITY = LIMITS.max_seq_len + LIMITS.max_batch_tokens
NUM_LAYERS = 3
HEAD_DIM = 64
SMS = (86, 89, 120)
IN_PLACE = (89, 120)  # for SM 80 and 86 the compiler copies all the same
TILE = 64  # cache positions
GAMMA = 5


@dataclass(frozen=True)
class Layer:
    """One line of the listing: a kernel, and the shapes of what it reads and writes, -1 where the call decides."""

    name: str
    reads: tuple[tuple[str, tuple[int, ...]], ...]
    writes: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def is_attention(self) -> bool:
        return "_mha_" in self.name


@dataclass(frozen=True)
class Listing:
    """The engine of one graph."""

    layers: tuple[Layer, ...]
    scratch_bytes: int


def listings(messages: list[str]) -> dict[str, Listing]:
    """By graph, in the order of compilation."""
    parts = "\n".join(messages).split("Input filename:")[1:]  # what the parser says first
    names = (bindings.TARGET_GRAPH, bindings.DRAFT_GRAPH)
    return {
        name: Listing(tuple(_layers(part)), max(map(int, re.findall(r"Max Scratch Memory: (\d+) bytes", part))))
        for name, part in zip(names, parts, strict=True)
    }


def _layers(text: str) -> Iterator[Layer]:
    for line in text.splitlines():
        if found := re.match(r"Name: (.+?), LayerType: ", line):
            reads, _, writes = line.partition("Outputs: [")
            yield Layer(found.group(1), _tensors(reads), _tensors(writes))


def _tensors(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found = re.findall(r"Name: ([^,]+), Dimensions: \[([-\d,]*)\]", text)
    return tuple((name, tuple(int(size) for size in sizes.split(",") if size)) for name, sizes in found)


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Two query heads for each key head."""
    target = write_target(
        folder / "target", family="qwen3", layers=NUM_LAYERS, hidden=4 * HEAD_DIM, head_dim=HEAD_DIM, max_positions=1024
    )
    return target, write_drafter(folder / "drafter", target, layers=NUM_LAYERS, gamma=GAMMA)


@pytest.fixture(scope="module", params=SMS, ids=lambda sm: f"sm{sm}")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, Listing]]:
    folder = tmp_path_factory.mktemp("listing")
    pair = export(*write_pair(folder), folder / "graphs", LIMITS, "bf16")
    messages: list[str] = []
    names = (bindings.TARGET_GRAPH, bindings.DRAFT_GRAPH)
    compile_pair(pair, folder / "engines", use_plugins=True, names=names, sms=(request.param,), listen=messages.append)
    return request.param, listings(messages)


def attention_over(listing: Listing, group: str) -> list[Layer]:
    """Attention that reads a group's caches under their own names, which are bound memory and no copies."""
    return [
        layer
        for layer in listing.layers
        if layer.is_attention and any(name.startswith(f"{group}.key_cache.") for name, _ in layer.reads)
    ]


GROUPS = {
    bindings.TARGET_GRAPH: (bindings.DECODE, 3),
    bindings.DRAFT_GRAPH: (bindings.CONTEXT, 1),
}  # and their profiles


@pytest.mark.parametrize("graph", GROUPS)
def test_attention_reads_the_caches_in_place(compiled: tuple[int, dict[str, Listing]], graph: str) -> None:
    sm, found = compiled
    group, num_profiles = GROUPS[graph]
    listing = found[graph]
    layers = attention_over(listing, group)
    if sm not in IN_PLACE:  # once it is not so any more, the warning of compile_graphs may go
        assert layers == []
        return
    assert len(layers) == NUM_LAYERS * num_profiles
    cache = (-1, 2, CAPACITY, HEAD_DIM)
    for layer in layers:
        assert [shape for name, shape in layer.reads if "_cache." in name] == [cache, cache], layer.name
    writers = [layer for layer in listing.layers if any(_is_copy(name, shape) for name, shape in layer.writes)]
    readers = {layer.name for layer in writers if any(name.startswith(f"{group}.") for name, _ in layer.reads)}
    assert readers == set(), "nothing else makes something of the size of a cache out of one"


def _is_copy(name: str, shape: tuple[int, ...]) -> bool:
    """Of the size of a cache and none of the caches."""
    return CAPACITY in shape and HEAD_DIM in shape and "_cache." not in name


@pytest.mark.parametrize("graph", GROUPS)
def test_attention_gets_the_list_of_visible_tiles(compiled: tuple[int, dict[str, Listing]], graph: str) -> None:
    """A count, up to CAPACITY / TILE indices and one more place, for each row: they are few enough queries for one tile."""
    group, num_profiles = GROUPS[graph]
    shape = (-1, 1, 1, CAPACITY // TILE + 2)
    lists = [
        name
        for layer in compiled[1][graph].layers
        if layer.is_attention
        for name, found in layer.reads
        if found == shape
    ]
    assert len(set(lists)) == len(lists) == NUM_LAYERS * num_profiles, f"one for each layer and profile of {group}"


def test_left_alone_caches_are_copied_and_no_tiles_are_listed(compiled: tuple[int, dict[str, Listing]]) -> None:
    """The prefill group, which is not rewritten. If this fails, TensorRT-RTX got better and the rewriting may go."""
    target = compiled[1][bindings.TARGET_GRAPH]
    copies = [
        layer.name
        for layer in target.layers
        if any(_is_copy(name, shape) for name, shape in layer.writes)
        and any(name.startswith(f"{bindings.PREFILL}.key_cache.") for name, _ in layer.reads)
    ]
    assert len(copies) == NUM_LAYERS
