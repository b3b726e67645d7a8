"""The DeviceSession of a TensorRT engine.

Tensors are bound by name. A bound call has an execution context of its own, whose shapes and addresses never change
again, so that a CUDA graph of it stays valid; other calls share one context for each optimisation profile.

Sessions cannot run in CI, where no GPU is; the choice of a profile runs there, the rest in
tests/gpu/test_tensorrt_engines.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark_trt.contract import bindings
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.session import Tensors
from dspark_trt.engines.tensorrt.compiler.profiles import ShapeRange, choose_profile
from dspark_trt.engines.tensorrt.runtime import TensorRTRuntime, scratch_bytes
from dspark_trt.errors import EngineBuildError

ALIGNMENT_BYTES = 256  # of every address (IExecutionContext::setTensorAddress)


class TensorRTSession:
    """DeviceSession of one engine file."""

    def __init__(self, path: Path, runtime: TensorRTRuntime) -> None:
        """Raises EngineBuildError when the engine cannot be opened or writes a cache into another one's memory."""
        trt = runtime.trt
        self._name = str(path)
        self._runtime = runtime
        self._engine = engine = runtime.deserialize(path)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self._inputs = [each for each in names if engine.get_tensor_mode(each) == trt.TensorIOMode.INPUT]
        types = {
            trt.int64: torch.int64,
            trt.float32: torch.float32,
            trt.float16: torch.float16,
            trt.bfloat16: torch.bfloat16,
        }
        self._types = {each: types[engine.get_tensor_dtype(each)] for each in names}
        self._caches = {each for each in self._inputs if bindings.cache_output(each) in self._types}
        for cache in self._caches:
            output = bindings.cache_output(cache)
            # TensorRT tells of the aliases of its own layers only, not of a plugin's: both are bound to one address
            if (found := engine.get_aliased_input_tensor(output)) not in (None, "", cache):
                raise EngineBuildError(
                    f"{path}: expected {output} in the memory of {cache}, found it in that of {found}; run "
                    "`dspark-trt build` again, and report it"
                )
        self._profiles = [
            {each: _shape_range(engine.get_tensor_profile_shape(each, index)) for each in self._inputs}
            for index in range(engine.num_optimization_profiles)
        ]
        self._context_of_profile: dict[int, _Context] = {}

    def run(self, tensors: Tensors) -> None:
        """Raises EngineBuildError when a tensor does not fit or TensorRT fails."""
        with torch_errors(self._name):
            profile = self._profile(tensors)
            if profile not in self._context_of_profile:
                self._context_of_profile[profile] = self._context(profile, bound=False)
            context = self._context_of_profile[profile]
            placed = {each: self._placed(each, tensors[each]) for each in self._types}
            context.bind(self._inputs, self._checked(placed))
            context.enqueue()
            for each in self._types.keys() - self._inputs:
                if placed[each] is not tensors[each]:
                    tensors[each].copy_(placed[each])

    def bind(self, tensors: Tensors) -> Callable[[], None]:
        """Raises EngineBuildError when a tensor does not fit or TensorRT fails."""
        with torch_errors(self._name):
            context = self._context(self._profile(tensors), bound=True)
            context.bind(self._inputs, self._checked({each: tensors[each] for each in self._types}))
        return context.enqueue

    def _profile(self, tensors: Tensors) -> int:
        shapes = {each: tuple(tensors[each].shape) for each in self._inputs}
        return choose_profile(self._profiles, shapes, where=self._name)

    def _context(self, profile: int, *, bound: bool) -> _Context:
        return _Context(self._engine, self._runtime, self._name, profile, bound=bound)

    def _placed(self, name: str, tensor: Any) -> Any:
        """The tensor, or a copy where its address is none for TensorRT:
        a part of a buffer whose rows are not multiples."""
        is_cache = name in self._caches or name.removesuffix(bindings.cache_output("")) in self._caches
        return tensor if is_cache or tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()

    def _checked(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """A tensor of another type, or not contiguous, would be read as if it were as expected."""
        device = self._runtime.device
        for each, tensor in tensors.items():
            is_usable = tensor.dtype == self._types[each] and tensor.device == device and tensor.is_contiguous()
            if not is_usable or tensor.data_ptr() % ALIGNMENT_BYTES:
                raise EngineBuildError(
                    f"{self._name}: {each}: expected a contiguous {self._types[each]} tensor on {device} at a "
                    f"multiple of {ALIGNMENT_BYTES} bytes, found {tensor.dtype} on {tensor.device} at "
                    f"{tensor.data_ptr():#x}; report this"
                )
        return tensors


class _Context:
    """An execution context with one profile."""

    def __init__(self, engine: Any, runtime: TensorRTRuntime, name: str, profile: int, *, bound: bool) -> None:
        self._runtime = runtime
        self._name = name
        self._context = runtime.create_context(engine, bound=bound)
        if self._context is None:
            raise runtime.failure(f"{name}: an execution context cannot be made")
        if self._context.active_optimization_profile != profile:
            with runtime.stream() as stream:
                self._check(self._context.set_optimization_profile_async(profile, stream), f"profile {profile}")
        self._memory = runtime.memory(scratch_bytes(engine))
        self._context.set_device_memory(self._memory.data_ptr(), len(self._memory))
        self._tensors: Mapping[str, Any] = {}

    def bind(self, inputs: Sequence[str], tensors: Mapping[str, Any]) -> None:
        for each in inputs:
            shape = tuple(tensors[each].shape)
            self._check(self._context.set_input_shape(each, shape), f"{each} of shape {shape}")
        for each in tensors.keys() - set(inputs):
            found, wanted = tuple(tensors[each].shape), tuple(self._context.get_tensor_shape(each))
            if found != wanted:  # it would be written past
                raise EngineBuildError(f"{self._name}: {each}: expected a tensor of shape {wanted}, found {found}")
        for each, tensor in tensors.items():
            self._check(self._context.set_tensor_address(each, tensor.data_ptr()), f"the address of {each}")
        self._tensors = tensors  # alive until others are bound

    def enqueue(self) -> None:
        """Raises EngineBuildError when TensorRT refuses the call."""
        with self._runtime.stream() as stream:
            self._check(self._context.execute_async_v3(stream), "a call")

    def _check(self, is_ok: bool, what: str) -> None:
        if not is_ok:
            raise self._runtime.failure(f"{self._name}: TensorRT refuses {what}")


def _shape_range(profile_shape: Sequence[Any]) -> ShapeRange:
    smallest, _, largest = profile_shape
    return tuple(smallest), tuple(largest)
