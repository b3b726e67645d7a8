"""Launches compiled kernels through the CUDA driver (cuda-python), for the TensorRT plugin and for torch tensors alike.

A call is a fixed list of launches on one stream: nothing is allocated, copied to the host or waited for, so it can be
captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from cuda.bindings import driver
from dspark_trt_plugins.bundle import CompiledKernel, KernelBundle
from dspark_trt_plugins.operation import (
    POINTER_ALIGNMENT,
    Extents,
    Operation,
    Tensor,
    extents_of,
    workspace_offsets,
)

_SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
_WARP_SIZE = 32


class LoadedKernels:
    """The kernels of one operation, loaded for the GPU of the current CUDA context.

    Everything that can fail or synchronise happens in the constructor: call it outside of a graph capture.
    """

    def __init__(self, operation: Operation, bundle: KernelBundle) -> None:
        """Raises ValueError when the bundle is of another form or has no code for this GPU,
        RuntimeError on CUDA errors."""
        if (bundle.operation, dict(bundle.attributes)) != (operation.name, dict(operation.attributes)):
            raise ValueError(
                f"expected kernels of {operation.name} {dict(operation.attributes)}, found {bundle.operation} "
                f"{dict(bundle.attributes)}; compile them for this form"
            )
        _checked(driver.cuInit(0))
        device = _checked(driver.cuCtxGetDevice())
        kind = driver.CUdevice_attribute
        major, minor = (
            _checked(driver.cuDeviceGetAttribute(attribute, device))
            for attribute in (
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self._operation = operation
        self._kernels = {kernel.name: kernel for kernel in bundle.for_device(major, minor)}
        self._libraries = []
        self._functions = {}
        for name, kernel in self._kernels.items():
            library = _checked(driver.cuLibraryLoadData(kernel.cubin, [], [], 0, [], [], 0))
            self._libraries.append(library)
            handle = _checked(driver.cuLibraryGetKernel(library, kernel.entry.encode()))
            if kernel.shared_bytes > _SHARED_BYTES_WITHOUT_ASKING:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _checked(driver.cuKernelSetAttribute(attribute, kernel.shared_bytes, handle, device))
            self._functions[name] = _checked(driver.cuKernelGetFunction(handle))

    def enqueue(self, extents: Extents, pointers: Mapping[str, int], stream: int) -> None:
        """Launch everything on `stream`. `pointers`:
        device addresses of inputs, outputs and workspace by tensor name."""
        for name, pointer in pointers.items():
            if pointer % POINTER_ALIGNMENT:
                raise ValueError(
                    f"{name}: expected an address aligned to {POINTER_ALIGNMENT} bytes, found {pointer:#x}"
                )
        arguments = self._operation.arguments
        for launch in self._operation.launches(extents):
            if 0 in launch.grid:
                continue
            kernel = self._kernels[launch.kernel]
            values, types = _parameters(kernel, arguments, pointers, launch.scalars)
            _checked(
                driver.cuLaunchKernel(
                    self._functions[launch.kernel],
                    *launch.grid,
                    1,
                    kernel.num_warps * _WARP_SIZE,
                    1,
                    1,
                    kernel.shared_bytes,
                    stream,
                    (values, types),
                    0,
                )
            )


def _parameters(
    kernel: CompiledKernel,
    arguments: Mapping[str, str | int | None],
    pointers: Mapping[str, int],
    scalars: Mapping[str, int],
) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Values and C types in the order of the kernel, with the pointers that Triton adds at the end."""
    values, types = [], []
    for name in kernel.parameters:
        tensor = arguments.get(name)
        is_pointer = isinstance(tensor, str)
        values.append(pointers[tensor] if isinstance(tensor, str) else scalars[name])
        types.append(ctypes.c_void_p if is_pointer else ctypes.c_int)
    hidden = kernel.num_hidden_pointers
    return (*values, *[0] * hidden), (*types, *[ctypes.c_void_p] * hidden)


def workspace_pointers(tensors: tuple[Tensor, ...], extents: Extents, workspace: int) -> dict[str, int]:
    offsets, _ = workspace_offsets(tensors, extents)
    return {name: workspace + offset for name, offset in offsets.items()}


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises RuntimeError with CUDA's own words."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"CUDA driver: {status.name}: {text.decode() if text else 'unknown error'}")
    return values[0] if values else None


class TorchOperation:
    """One operation on torch CUDA tensors, on torch's current stream."""

    def __init__(self, operation: Operation, bundle: KernelBundle) -> None:
        """Raises what LoadedKernels raises. The CUDA context is torch's current one."""
        import torch

        torch.cuda.current_stream().synchronize()  # makes torch's context the current one
        self._torch = torch
        self._operation = operation
        self._kernels = LoadedKernels(operation, bundle)

    def __call__(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Outputs by name, in new tensors or in those given.

        Inputs are contiguous tensors of the operation's element types. Raises ValueError when a tensor does not fit.
        """
        torch, operation = self._torch, self._operation
        extents = extents_of(operation.inputs, [inputs[tensor.name].shape for tensor in operation.inputs])
        device = inputs[operation.inputs[0].name].device
        tensors = {tensor.name: inputs[tensor.name] for tensor in operation.inputs}
        for tensor in operation.outputs:
            if outputs is None:
                shape, element_type = tensor.shape_in(extents), getattr(torch, tensor.element_type)
                tensors[tensor.name] = torch.empty(shape, dtype=element_type, device=device)
            else:
                tensors[tensor.name] = outputs[tensor.name]
        for tensor in (*operation.inputs, *operation.outputs):
            self._check(tensor, tensors[tensor.name], extents)
        _, size = workspace_offsets(operation.workspace, extents)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        pointers |= workspace_pointers(operation.workspace, extents, workspace.data_ptr())
        with torch.cuda.device(device):  # a stream 0 is the current device's, and kernels are loaded for this one
            self._kernels.enqueue(extents, pointers, torch.cuda.current_stream(device).cuda_stream)
        return {tensor.name: tensors[tensor.name] for tensor in operation.outputs}

    def _check(self, tensor: Tensor, value: Any, extents: Extents) -> None:
        expected = (tensor.shape_in(extents), getattr(self._torch, tensor.element_type))
        if (tuple(value.shape), value.dtype) != expected or not value.is_contiguous() or not value.is_cuda:
            raise ValueError(
                f"{tensor.name}: expected a contiguous CUDA tensor of {expected}, found {tuple(value.shape)} "
                f"{value.dtype} on {value.device}"
            )
