"""Optimisation profiles: the extents that each graph is compiled for, and which profile serves a call.

A compiler tunes for the usual extents of a profile and takes memory for the largest. The more a profile fixes, the
better its kernels fit; so the tight profiles come first. Prompt chunks stay packed and have one profile, but where a
layer pads them to the longest: there B rows of S padded tokens have B * S within max_batch_tokens (device/buckets), and
a few profiles cover that, where one of the most rows and of the longest chunk would take memory for many times as much.

Shape letters as in `bindings`: `T` packed tokens, `L` logit rows, `R` requests, `G` gamma; `B` rows and `S` padded
query length of a row group; `P` pages of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dspark_trt_plugins.operation import next_power_of_2

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.contract.draft_bindings import draft_inputs
from dspark_trt.contract.model_bindings import model_inputs
from dspark_trt.contract.page_plan import most_pages
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.select_bindings import select_inputs
from dspark_trt.errors import EngineBuildError

GRAPHS = (bindings.TARGET_GRAPH, bindings.INGEST_GRAPH, bindings.DRAFT_GRAPH, bindings.SELECT_GRAPH)
MODEL_GRAPHS = (bindings.TARGET_GRAPH, bindings.MODEL_GRAPH, bindings.SELECT_GRAPH)  # where a language model drafts
Shape = tuple[int, ...]
ShapeRange = tuple[Shape, Shape]  # smallest and largest
PREFILL_STEP = 8  # how many times more rows the next profile of prompt chunks has
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
    """The input bindings of one of GRAPHS or MODEL_GRAPHS."""
    drafter_inputs = {
        bindings.INGEST_GRAPH: bindings.ingest_inputs,
        bindings.DRAFT_GRAPH: draft_inputs,
        bindings.MODEL_GRAPH: model_inputs,
        bindings.SELECT_GRAPH: select_inputs,
    }
    return bindings.target_inputs(target) if graph == bindings.TARGET_GRAPH else drafter_inputs[graph](drafter)


def graph_profiles(graph: str, target: TargetDims, drafter: DrafterDims) -> tuple[Profile, ...]:
    """The profiles of a graph, the tightest first, those of prompt chunks last and by rising rows.

    The runtime pads within the limits (device/buckets): tokens never exceed max_batch_tokens, nor requests and rows
    max_requests.
    """
    limits, gamma = target.limits, drafter.gamma
    made = {
        bindings.TARGET_GRAPH: lambda: _target(limits, gamma, pads_chunks=target.pads_chunks),
        bindings.INGEST_GRAPH: lambda: _ingest(limits, gamma, pads_chunks=not drafter.cache.page_positions),
        bindings.DRAFT_GRAPH: lambda: _draft(limits, gamma),
        bindings.MODEL_GRAPH: lambda: _model(limits, gamma, drafter.num_masks),
        bindings.SELECT_GRAPH: lambda: _select(limits, gamma),
    }[graph]()
    pages = {} if graph == bindings.SELECT_GRAPH else {"P": _pages(target, drafter)}
    return tuple(replace(profile, extents={**profile.extents, **pages}) for profile in made)


def _pages(target: TargetDims, drafter: DrafterDims) -> ExtentRange:
    most = most_pages(target, drafter)
    fewest = min(2, most)
    return ExtentRange(fewest, max(most // 2, fewest), most)


def choose_profile(profiles: Sequence[Mapping[str, ShapeRange]], shapes: Mapping[str, Shape], *, where: str) -> int:
    """Index of the first profile that serves a call.

    Args:
        profiles: ranges of every input's shape.
        shapes: of every input of the call.

    Raises EngineBuildError when there is none.
    """
    for index, profile in enumerate(profiles):
        if all(_is_within(shape, profile[name]) for name, shape in shapes.items()):
            return index
    misfits = min((_misfits(profile, shapes) for profile in reversed(profiles)), key=len)
    raise EngineBuildError(
        f"{where}: a call fits no profile of the engine, found {', '.join(misfits)}; build with larger "
        "--max-requests or --max-batch-tokens"
    )


def _misfits(profile: Mapping[str, ShapeRange], shapes: Mapping[str, Shape]) -> list[str]:
    return [
        f"{name} {shape} (expected {profile[name][0]} to {profile[name][1]})"
        for name, shape in shapes.items()
        if not _is_within(shape, profile[name])
    ]


def prefill_corners(limits: EngineLimits) -> tuple[tuple[int, int], ...]:
    """The most rows and the longest chunk (B, S) of each profile of prompt chunks that are padded.

    Every call of B * S <= max_batch_tokens is within one of them, and none of them is more than PREFILL_STEP times
    max_batch_tokens.
    """
    corners, fewest, most = [], 1, 1
    while fewest <= limits.max_requests:
        most = min(most, limits.max_requests)
        corners.append((most, max(limits.max_batch_tokens // fewest, 1)))
        fewest, most = most + 1, most * PREFILL_STEP
    return tuple(corners)


def _is_within(shape: Shape, allowed: ShapeRange) -> bool:
    smallest, largest = allowed
    return len(shape) == len(smallest) and all(
        low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)
    )


def _target(limits: EngineLimits, gamma: int, *, pads_chunks: bool) -> tuple[Profile, ...]:
    tokens, rows = _tokens(limits, gamma), _rows(limits)
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
    return (
        profile("decode", plain, decode, idle),
        profile("verify", drafted, verify, idle),
        *(
            profile(name, _chunk(limits), ExtentRange(1, gamma + 1, gamma + 1), chunk)
            for name, chunk in _prefill(limits, pads_chunks)
        ),
    )


def _ingest(limits: EngineLimits, gamma: int, *, pads_chunks: bool) -> tuple[Profile, ...]:
    """After a verification up to gamma + 1 tokens of each request, after a prefill chunk all of it."""
    group, length = f"B_{bindings.CONTEXT}", f"S_{bindings.CONTEXT}"
    largest = min(next_power_of_2(limits.max_requests * (gamma + 1)), limits.max_batch_tokens)
    committed = {
        "T": ExtentRange(1, _tokens(limits, gamma).usual, largest),
        group: _rows(limits),
        length: ExtentRange(1, gamma + 1, gamma + 1),  # of families whose context stands in rows
        "R": _rows(limits),  # of families that keep a state of each row
    }
    requests = ExtentRange(1, 1, limits.max_requests)
    return (
        Profile("verify", committed),
        *(
            Profile(name, {"T": _chunk(limits), group: rows, length: longest, "R": requests})
            for name, (rows, longest) in _prefill(limits, pads_chunks)
        ),
    )


def _draft(limits: EngineLimits, gamma: int) -> tuple[Profile, ...]:
    return (Profile("draft", {"R": _rows(limits), f"B_{bindings.CONTEXT}": _rows(limits)}),)


def _model(limits: EngineLimits, gamma: int, num_masks: int) -> tuple[Profile, ...]:
    """A draft behind another one; the first pass of a block, which reads what was committed, or that alone; prompts."""
    rows, one = _rows(limits), _exactly(1)
    group = f"B_{bindings.CONTEXT}", f"S_{bindings.CONTEXT}"
    longest, drafted = gamma + 2 + num_masks, 1 + num_masks
    block = {
        "T": _up_to(limits.max_requests * longest, rows.usual * (drafted + 1)),
        "L": _up_to(limits.max_requests * drafted, rows.usual * drafted),
        group[0]: rows,
        group[1]: ExtentRange(1, longest, longest),
    }
    return (
        *(() if num_masks else (Profile("slot", {"T": rows, "L": rows, group[0]: rows, group[1]: one}),)),
        Profile("block", block),
        *(
            Profile(name, {"T": _chunk(limits), "L": one, group[0]: chunk[0], group[1]: chunk[1]})
            for name, chunk in _prefill(limits, pads_chunks=True)
        ),
    )


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


def _prefill(limits: EngineLimits, pads_chunks: bool) -> list[tuple[str, tuple[ExtentRange, ExtentRange]]]:
    """Of each profile of prompt chunks its name, and B and S."""
    if pads_chunks:
        return [
            (f"prefill {rows}", (ExtentRange(1, rows, rows), ExtentRange(1, length, length)))
            for rows, length in prefill_corners(limits)
        ]
    return [("prefill", (ExtentRange(1, 1, limits.max_requests), _chunk(limits)))]


def _chunk(limits: EngineLimits) -> ExtentRange:
    """Packed tokens of a step with a prefill chunk."""
    return _up_to(limits.max_batch_tokens, limits.max_batch_tokens)
