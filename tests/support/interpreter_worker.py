"""Runs the launches of an operation under Triton's CPU interpreter, on torch tensors with poisoned surroundings.

Fails where an address outside of the operation's tensors is read or written, where a value from there reaches a result,
and where an input changes.

Imported by the process that `interpreted_kernels` starts only. Triton 3.9's interpreter keeps bfloat16 as uint16 and
multiplies these integers in tl.dot; here they are widened first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and the kernel modules are imported

import numpy as np
import torch
import triton.language as tl
from dspark_trt_plugins.operation import Operation, Tensor, extents_of, kernel_function
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

assert isinstance(tl.sum, InterpretedFunction), "Triton was imported before TRITON_INTERPRET was set"

GUARD = 512  # elements before and behind every tensor
POISON_INTEGER = 0x5A5A5A5A


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


_create_dot = InterpreterBuilder.create_dot
InterpreterBuilder.create_dot = lambda builder, a, b, *rest: _create_dot(builder, _widened(a), _widened(b), *rest)


class PatchOnce:
    """The interpreter replaces the language's functions for the length of a launch, and does so again at every call of
    a function that a kernel calls: that changes nothing but once for every module, and takes most of the time."""

    def __init__(self) -> None:
        self._patch = interpreter._patch_lang
        self._scopes: dict[int, Any] = {}
        interpreter._patch_lang = self

    def __call__(self, function: Any) -> PatchOnce:
        module = id(function.__globals__)
        if module not in self._scopes:
            self._scopes[module] = self._patch(function)
        return self

    def restore(self) -> None:
        """Called at the end of a launch only."""
        for scope in reversed(self._scopes.values()):
            scope.restore()
        self._scopes.clear()


PatchOnce()


class MemoryCheck:
    """Every address that a kernel reads or writes has to be inside of a tensor of the operation."""

    def __init__(self) -> None:
        self._begins = self._ends = np.zeros(0, np.uint64)
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def checked_load(builder: Any, pointers: TensorHandle, mask: TensorHandle, *rest: Any) -> Any:
            self._check("read", pointers, mask)
            return load(builder, pointers, mask, *rest)

        def checked_store(builder: Any, pointers: TensorHandle, value: Any, mask: TensorHandle, *rest: Any) -> Any:
            self._check("written", pointers, mask)
            return store(builder, pointers, value, mask, *rest)

        InterpreterBuilder.create_masked_load = checked_load
        InterpreterBuilder.create_masked_store = checked_store

    def allow(self, tensors: Iterable[torch.Tensor]) -> None:
        ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.nbytes)
        self._begins, self._ends = (np.array(column, np.uint64) for column in zip(*ranges, strict=True))

    def _check(self, what: str, pointers: TensorHandle, mask: TensorHandle) -> None:
        addresses = pointers.data[mask.data]
        num_bytes = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        owner = np.searchsorted(self._begins, addresses, side="right").astype(np.int64) - 1
        is_inside = (owner >= 0) & (addresses + np.uint64(num_bytes) <= self._ends[owner])
        assert is_inside.all(), f"{np.count_nonzero(~is_inside)} elements {what} outside of every tensor"


_memory = MemoryCheck()


class GuardedTensor:
    """A tensor inside a larger allocation that holds NaN, or an integer far outside every tensor, everywhere else."""

    def __init__(self, tensor: Tensor, extents: Mapping[str, int], value: NDArray[Any] | None = None) -> None:
        shape = tensor.shape_in(extents)
        element_type = getattr(torch, tensor.element_type)
        poison: Any = float("nan") if element_type.is_floating_point else POISON_INTEGER
        count = int(np.prod(shape))
        self._memory = torch.full((count + 2 * GUARD,), poison, dtype=element_type)
        self._poison = self._memory[:GUARD].clone()
        self.name = tensor.name
        self.value = self._memory[GUARD : GUARD + count].view(shape)
        if value is not None:
            self.value.copy_(torch.from_numpy(np.ascontiguousarray(value)))

    def assert_surroundings_untouched(self) -> None:
        for part in (self._memory[:GUARD], self._memory[-GUARD:]):
            assert torch.equal(part.view(torch.uint8), self._poison.view(torch.uint8)), f"{self.name}: written outside"


def run(operation: Operation, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Outputs and workspace by name; bfloat16 as float32. Float inputs are rounded to the operation's element types."""
    kernels = {kernel.name: kernel for kernel in operation.kernels}
    extents = extents_of(operation.inputs, [inputs[tensor.name].shape for tensor in operation.inputs])
    tensors = {tensor.name: GuardedTensor(tensor, extents, inputs[tensor.name]) for tensor in operation.inputs}
    before = {name: tensor.value.clone() for name, tensor in tensors.items()}
    tensors |= {
        tensor.name: GuardedTensor(tensor, extents, inputs.get(tensor.alias_of or ""))
        for tensor in (*operation.outputs, *operation.workspace)
    }
    _memory.allow(tensor.value for tensor in tensors.values())
    for launch in operation.launches(extents):
        if 0 in launch.grid:
            continue
        kernel = kernels[launch.kernel]
        function = kernel_function(operation, kernel)
        values: dict[str, Any] = {**operation.arguments, **kernel.constants, **launch.scalars}
        arguments = {name: values[name] for name in function.arg_names}
        function[launch.grid](
            **{name: tensors[value].value if isinstance(value, str) else value for name, value in arguments.items()}
        )
    for tensor in tensors.values():
        tensor.assert_surroundings_untouched()
    for name, value in before.items():
        assert torch.equal(value.view(torch.uint8), tensors[name].value.view(torch.uint8)), f"{name}: an input changed"
    written = (*operation.outputs, *operation.workspace)
    return {tensor.name: _as_array(tensors[tensor.name].value) for tensor in written}


def _as_array(value: torch.Tensor) -> NDArray[Any]:
    """NumPy has no bfloat16."""
    result: NDArray[Any] = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    return result
