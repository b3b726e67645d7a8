"""Triton model configurations as typed data, and their text form (config.pbtxt).

Only what this product's models need. Each tensor, map entry and parameter takes one line, so that a difference between
two configurations reads as a difference of fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

DataType = Literal["BOOL", "FP32", "FP64", "INT32", "INT64", "STRING", "UINT64"]

ANY = -1  # a dimension of any size


@dataclass(frozen=True, slots=True)
class TritonTensor:
    """An input or output. `dims` leaves out the batch dimension, which every model here has."""

    name: str
    data_type: DataType
    dims: tuple[int, ...] = (1,)
    is_optional: bool = False

    def lines(self) -> Iterator[str]:
        optional = " optional: true" if self.is_optional else ""
        dims = ", ".join(str(size) for size in self.dims)
        yield f"  {{ name: {quote(self.name)} data_type: TYPE_{self.data_type} dims: [ {dims} ]{optional} }}"


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One model of an ensemble; the maps go from the model's tensor names to the ensemble's."""

    model_name: str
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        yield "    {"
        yield f"      model_name: {quote(self.model_name)} model_version: -1"
        for kind, entries in (("input_map", self.input_map), ("output_map", self.output_map)):
            for key, value in entries.items():
                yield f"      {kind} {{ key: {quote(key)} value: {quote(value)} }}"
        yield "    }"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model of the repository: a Python model, or an ensemble where it has steps."""

    name: str
    inputs: tuple[TritonTensor, ...]
    outputs: tuple[TritonTensor, ...]
    is_decoupled: bool = False
    num_instances: int = 1  # of a model that keeps state or order, never more
    steps: tuple[EnsembleStep, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The content of config.pbtxt."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"name: {quote(self.name)}"
        yield 'platform: "ensemble"' if self.steps else 'backend: "python"'
        yield "max_batch_size: 1"  # a request is one sequence; batching is the decoding loop's own work
        if self.is_decoupled:
            yield "model_transaction_policy { decoupled: true }"
        yield from _list("input", self.inputs)
        yield from _list("output", self.outputs)
        if self.steps:
            yield "ensemble_scheduling {"
            yield "  step ["
            yield from _joined(self.steps)
            yield "  ]"
            yield "}"
        else:
            yield f"instance_group [ {{ count: {self.num_instances} kind: KIND_CPU }} ]"
        for key, value in self.parameters.items():
            yield _parameter_line(key, value)


def read_parameter(text: str, key: str) -> str:
    """The value of a parameter in a config.pbtxt of ours. Raises ValueError when it is not there exactly once."""
    found = re.findall(
        rf'^parameters {{ key: {re.escape(quote(key))} value: {{ string_value: ("(?:[^"\\]|\\.)*") }} }}$',
        text,
        re.MULTILINE,
    )
    if len(found) != 1:
        raise ValueError(f"expected one parameter {key!r} in config.pbtxt, found {len(found)}")
    value: str = json.loads(found[0])
    return value


def quote(text: str) -> str:
    """A string literal of the protobuf text format."""
    return json.dumps(text)


def _parameter_line(key: str, value: str) -> str:
    return f"parameters {{ key: {quote(key)} value: {{ string_value: {quote(value)} }} }}"


def _list(name: str, tensors: tuple[TritonTensor, ...]) -> Iterator[str]:
    yield f"{name} ["
    yield from _joined(tensors)
    yield "]"


def _joined(parts: Sequence[TritonTensor | EnsembleStep]) -> Iterator[str]:
    """The lines of all parts, with the comma that the text format wants between two of them."""
    for index, part in enumerate(parts):
        *lines, last = part.lines()
        yield from lines
        yield last if index == len(parts) - 1 else f"{last},"
