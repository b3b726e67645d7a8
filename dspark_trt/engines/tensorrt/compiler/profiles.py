"""Optimisation profiles: the extents that each graph is compiled for, and which profile serves a call.

A compiler tunes for the usual extents of a profile and takes memory for the largest. The more a profile fixes, the
better its kernels fit; so the tight profiles come first. Prompt chunks of B rows and S padded tokens each have B * S
within max_batch_tokens (device/buckets): a few profiles cover that, where one of the most rows and of the longest chunk
would take memory for many times as much.

Shape letters as in `bindings`: `T` packed tokens, `L` logit rows, `R` requests, `G` gamma; `B` KV rows and `S` padded
query length of a row group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dspark_trt_plugins.operation import next_power_of_2

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.contract.draft_bindings import draft_inputs
from dspark_trt.contract.model_bindings import model_inputs
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
    if graph == bindings.TARGET_GRAPH:
        return bindings.target_inputs(target)
    drafter_inputs = {
        bindings.INGEST_GRAPH: bindings.ingest_inputs,
        bindings.DRAFT_GRAPH: draft_inputs,
        bindings.MODEL_GRAPH: model_inputs,
        bindings.SELECT_GRAPH: select_inputs,
    }
    return drafter_inputs[graph](drafter)


def graph_profiles(graph: str, limits: EngineLimits, gamma: int, *, num_masks: int = 0) -> tuple[Profile, ...]:
    """The profiles of one of GRAPHS or MODEL_GRAPHS, the tightest first, those of prompt chunks last and by rising
    rows. `num_masks`: behind each anchor of a language model's block.

    The runtime pads within the limits (device/buckets): tokens never exceed max_batch_tokens, nor requests and rows
    max_requests.
    """
    if graph == bindings.MODEL_GRAPH:
        return _model(limits, gamma, num_masks)
    return {
        bindings.TARGET_GRAPH: _target,
        bindings.INGEST_GRAPH: _ingest,
        bindings.DRAFT_GRAPH: _draft,
        bindings.SELECT_GRAPH: _select,
    }[graph](limits, gamma)


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
    """The most rows and the longest chunk (B, S) of each profile of prompt chunks.

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


def _target(limits: EngineLimits, gamma: int) -> tuple[Profile, ...]:
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
            profile(f"prefill {most}", _chunk(limits), ExtentRange(1, gamma + 1, gamma + 1), chunk)
            for most, chunk in _prefill(limits)
        ),
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
    requests = ExtentRange(1, 1, limits.max_requests)
    return (
        Profile("verify", committed),
        *(
            Profile(f"prefill {most}", {"T": _chunk(limits), group[0]: rows, group[1]: length, "R": requests})
            for most, (rows, length) in _prefill(limits)
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
            Profile(f"prefill {most}", {"T": _chunk(limits), "L": one, group[0]: chunk[0], group[1]: chunk[1]})
            for most, chunk in _prefill(limits)
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


def _prefill(limits: EngineLimits) -> list[tuple[int, tuple[ExtentRange, ExtentRange]]]:
    """Of each profile of prompt chunks: the most rows; B and S."""
    return [
        (rows, (ExtentRange(1, rows, rows), ExtentRange(1, length, length))) for rows, length in prefill_corners(limits)
    ]


def _chunk(limits: EngineLimits) -> ExtentRange:
    """Packed tokens of a step with a prefill chunk."""
    return _up_to(limits.max_batch_tokens, limits.max_batch_tokens)
