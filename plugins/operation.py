"""What an operation on a GPU is made of: tensors, kernels, launches. Needs nothing but Python.

An operation says which kernels it has and in which order they are launched for given sizes. Three things follow that
order: the CPU interpreter in the tests, the launcher for torch tensors and the TensorRT plugin.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

# No bool: TensorRT's documentation says that plugins have none (PluginTensorDesc::type, 10.14)
ElementType = Literal["int32", "int64", "float16", "bfloat16", "float32"]
ELEMENT_BYTES: dict[ElementType, int] = {
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
}
NAMESPACE = "dspark"  # of the nodes, and of the plugins that take them
VERSION = "1"
POINTER_ALIGNMENT = 16  # bytes
WORKSPACE_ALIGNMENT = 256
Extents = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input, an output or a part of the workspace. A letter in the shape is an extent that a call decides."""

    name: str
    element_type: ElementType
    shape: tuple[str | int, ...]
    alias_of: str | None = None  # of an output: the input whose memory it is

    def shape_in(self, extents: Extents) -> tuple[int, ...]:
        return tuple(extents[size] if isinstance(size, str) else size for size in self.shape)

    @property
    def is_aligned(self) -> bool:
        """Whether kernels count on POINTER_ALIGNMENT. Vectors may stand anywhere: nothing is gained there."""
        return len(self.shape) > 1

    def num_bytes(self, extents: Extents) -> int:
        return math.prod(self.shape_in(extents)) * ELEMENT_BYTES[self.element_type]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One Triton function with everything fixed that is known when an engine is built."""

    name: str
    function: str  # module.function in the operation's package
    constants: Mapping[str, int] = field(default_factory=dict)  # beside those of Operation.arguments
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: str
    grid: tuple[int, int]
    scalars: Mapping[str, int] = field(default_factory=dict)  # int32 parameters


class Operation(Protocol):
    """One operation of one form: what its kernels are compiled from and how they are launched."""

    @property
    def name(self) -> str: ...

    @property
    def attributes(self) -> Mapping[str, int | str]:
        """What tells one form from another; also the attributes of the ONNX node."""
        ...

    @property
    def package(self) -> str:
        """Where the kernel modules are."""
        ...

    @property
    def inputs(self) -> tuple[Tensor, ...]: ...

    @property
    def outputs(self) -> tuple[Tensor, ...]: ...

    @property
    def workspace(self) -> tuple[Tensor, ...]:
        """Tensors that live as long as one call. Nothing in them needs to be cleared."""
        ...

    @property
    def kernels(self) -> tuple[Kernel, ...]: ...

    @property
    def arguments(self) -> Mapping[str, str | int | None]:
        """What a kernel's parameter of that name is, in all kernels: a tensor, a constant, or nothing in this form.

        Parameters that are not named here are the scalars of a launch.
        """
        ...

    def launches(self, extents: Extents) -> tuple[Launch, ...]:
        """In order, on one stream. None when there is nothing to compute."""
        ...


def extents_of(tensors: Sequence[Tensor], shapes: Iterable[Sequence[int]]) -> dict[str, int]:
    """The extents that a call decides, from the shapes of its inputs.

    Raises ValueError when a shape does not fit.
    """
    extents: dict[str, int] = {}
    for tensor, shape in zip(tensors, shapes, strict=True):
        sizes = zip(tensor.shape, shape, strict=False)
        is_match = len(tensor.shape) == len(shape) and all(
            extents.setdefault(size, found) == found if isinstance(size, str) else size == found
            for size, found in sizes
        )
        if not is_match:
            raise ValueError(f"{tensor.name}: expected shape {tensor.shape} where {extents}, found {tuple(shape)}")
    return extents


def workspace_offsets(tensors: Sequence[Tensor], extents: Extents) -> tuple[dict[str, int], int]:
    """Byte offset of each tensor in one allocation, and the size of it."""
    offsets, end = {}, 0
    for tensor in tensors:
        offsets[tensor.name] = end
        end += -(-tensor.num_bytes(extents) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return offsets, end


def kernel_function(operation: Operation, kernel: Kernel) -> Any:
    """The Triton function; imports Triton."""
    module, name = kernel.function.split(".")
    return getattr(importlib.import_module(f"{operation.package}.{module}"), name)


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def attributes_of(form: Any) -> dict[str, int | str]:
    """Fields of a form as attributes: integers (a bool is 0 or 1) and strings."""
    values = {name: getattr(form, name) for name in form.__dataclass_fields__}
    return {name: value if isinstance(value, str) else int(value) for name, value in values.items()}


def form_from_attributes(form_type: type[Any], attributes: Mapping[str, int | str]) -> Any:
    """The form that `attributes_of` was made from. Raises ValueError naming what is missing or unknown."""
    fields = form_type.__dataclass_fields__
    if set(attributes) != set(fields):
        raise ValueError(f"{form_type.__name__}: expected the attributes {sorted(fields)}, found {sorted(attributes)}")
    return form_type(
        **{name: bool(attributes[name]) if fields[name].type == "bool" else attributes[name] for name in fields}
    )
