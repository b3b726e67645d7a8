"""Optimisation profiles: the extents that each graph is compiled for, and which profile serves a call.

A compiler tunes for the usual extents of a profile and takes memory for the largest. The more a profile fixes, the
better its kernels fit; so the tight profiles come first and the widest one, which serves every call, last.

Shape letters as in `bindings`: `T` packed tokens, `L` logit rows, `R` requests, `G` gamma; `B` KV rows and `S` padded
query length of a row group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dspark_trt_plugins.operation import next_power_of_2

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import EngineBuildError

GRAPHS = (bindings.TARGET_GRAPH, bindings.INGEST_GRAPH, bindings.DRAFT_GRAPH, bindings.SELECT_GRAPH)
Shape = tuple[int, ...]
ShapeRange = tuple[Shape, Shape]  # smallest and largest
_USUAL_REQUESTS = 8  # where latency counts most; a larger batch costs little more while weights are what is read


@dataclass(frozen=True, slots=True)
class ExtentRange:
    """One dynamic extent of a profile."""

    smallest: int
    usual: int
    largest: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Ranges of all dynamic extents of a graph, by shape letter."""

    name: str
    extents: Mapping[str, ExtentRange]

    def shapes(self, binding: bindings.Binding) -> tuple[Shape, Shape, Shape]:
        """Smallest, usual and largest shape of a binding."""
        ranges = [
            self.extents[size] if isinstance(size, str) else ExtentRange(size, size, size) for size in binding.shape
        ]
        return (
            tuple(extent.smallest for extent in ranges),
            tuple(extent.usual for extent in ranges),
            tuple(extent.largest for extent in ranges),
        )


def graph_inputs(graph: str, target: TargetDims, drafter: DrafterDims) -> tuple[bindings.Binding, ...]:
    """The input bindings of one of GRAPHS."""
    if graph == bindings.TARGET_GRAPH:
        return bindings.target_inputs(target)
    drafter_inputs = {
        bindings.INGEST_GRAPH: bindings.ingest_inputs,
        bindings.DRAFT_GRAPH: bindings.draft_inputs,
        bindings.SELECT_GRAPH: bindings.select_inputs,
    }
    return drafter_inputs[graph](drafter)


def graph_profiles(graph: str, limits: EngineLimits, gamma: int) -> tuple[Profile, ...]:
    """The profiles of one of GRAPHS, the tightest first.

    The runtime pads within the limits (device/buckets): tokens never exceed max_batch_tokens, nor requests and rows
    max_requests.
    """
    return {
        bindings.TARGET_GRAPH: _target,
        bindings.INGEST_GRAPH: _ingest,
        bindings.DRAFT_GRAPH: _draft,
        bindings.SELECT_GRAPH: _select,
    }[graph](limits, gamma)


def choose_profile(profiles: Sequence[Mapping[str, ShapeRange]], shapes: Mapping[str, Shape], *, where: str) -> int:
    """Index of the first profile that serves a call; they stand from the tightest to the widest.

    Args:
        profiles: ranges of every input's shape.
        shapes: of every input of the call.

    Raises EngineBuildError when there is none.
    """
    for index, profile in enumerate(profiles):
        if all(_is_within(shape, profile[name]) for name, shape in shapes.items()):
            return index
    widest = profiles[-1]
    misfits = [
        f"{name} {shape} (expected {widest[name][0]} to {widest[name][1]})"
        for name, shape in shapes.items()
        if not _is_within(shape, widest[name])
    ]
    raise EngineBuildError(
        f"{where}: a call fits no profile of the engine, found {', '.join(misfits)}; build with larger "
        "--max-requests or --max-batch-tokens"
    )


def _is_within(shape: Shape, allowed: ShapeRange) -> bool:
    smallest, largest = allowed
    return len(shape) == len(smallest) and all(
        low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)
    )


def _target(limits: EngineLimits, gamma: int) -> tuple[Profile, ...]:
    tokens, rows, chunks = _tokens(limits, gamma), _rows(limits), _chunk(limits)
    decode, verify = _exactly(1), _exactly(gamma + 1)
    plain = _up_to(min(next_power_of_2(limits.max_requests), tokens.largest), _USUAL_REQUESTS)
    drafted = ExtentRange(1, tokens.usual, min(next_power_of_2(limits.max_requests * (gamma + 1)), tokens.largest))

    def profile(
        name: str, packed: ExtentRange, query: ExtentRange, prefill: tuple[ExtentRange, ExtentRange]
    ) -> Profile:
        wanted = ExtentRange(1, min(tokens.usual, packed.usual), packed.largest)  # L
        extents = {"T": packed, "L": wanted, f"B_{bindings.DECODE}": rows, f"S_{bindings.DECODE}": query}
        return Profile(name, extents | {f"B_{bindings.PREFILL}": prefill[0], f"S_{bindings.PREFILL}": prefill[1]})

    idle = (_exactly(1), _exactly(1))
    some = ExtentRange(1, 1, limits.max_requests)
    return (
        profile("decode", plain, decode, idle),
        profile("verify", drafted, verify, idle),
        profile("prefill", _chunk(limits), ExtentRange(1, gamma + 1, gamma + 1), (some, chunks)),
    )


def _ingest(limits: EngineLimits, gamma: int) -> tuple[Profile, ...]:
    """After a verification up to gamma + 1 tokens of each request, after a prefill chunk all of it."""
    group = f"B_{bindings.CONTEXT}", f"S_{bindings.CONTEXT}"
    largest = min(next_power_of_2(limits.max_requests * (gamma + 1)), limits.max_batch_tokens)
    committed = {
        "T": ExtentRange(1, _tokens(limits, gamma).usual, largest),
        group[0]: _rows(limits),
        group[1]: ExtentRange(1, gamma + 1, gamma + 1),
        "R": _rows(limits),  # of families that keep a state of each row
    }
    chunk = {
        "T": _chunk(limits),
        group[0]: ExtentRange(1, 1, limits.max_requests),
        group[1]: _chunk(limits),
        "R": ExtentRange(1, 1, limits.max_requests),
    }
    return (Profile("verify", committed), Profile("prefill", chunk))


def _draft(limits: EngineLimits, gamma: int) -> tuple[Profile, ...]:
    return (Profile("draft", {"R": _rows(limits), f"B_{bindings.CONTEXT}": _rows(limits)}),)


def _select(limits: EngineLimits, gamma: int) -> tuple[Profile, ...]:
    return (Profile("select", {"R": _rows(limits), "B": _rows(limits), "T": _tokens(limits, gamma)}),)


def _exactly(size: int) -> ExtentRange:
    return ExtentRange(size, size, size)


def _up_to(largest: int, usual: int) -> ExtentRange:
    return ExtentRange(1, min(usual, largest), largest)


def _rows(limits: EngineLimits) -> ExtentRange:
    """KV rows, and requests."""
    return _up_to(limits.max_requests, _USUAL_REQUESTS)


def _tokens(limits: EngineLimits, gamma: int) -> ExtentRange:
    """Packed tokens of a step that verifies."""
    return _up_to(limits.max_batch_tokens, min(_USUAL_REQUESTS, limits.max_requests) * (gamma + 1))


def _chunk(limits: EngineLimits) -> ExtentRange:
    """Packed tokens of a step with a prefill chunk, and the chunk's padded length."""
    return _up_to(limits.max_batch_tokens, limits.max_batch_tokens)
