"""Launch a compiled operation on the recording driver and print what it wrote down.

python -m tests.support.cuda_driver.record_launches DRIVER_LIBRARY WAY BUNDLE STREAM
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from dspark_trt_plugins.bundle import KernelBundle, read_bundle
from dspark_trt_plugins.operation import Operation
from dspark_trt_plugins.registry import operation_of

EXTENTS = {"R": 3, "B": 4, "S": 5, "T": 15, "D": 3, "E": 1, "X": 5, "P": 9}
WORKSPACE = 0x7F00_0000_0000


def address(index: int) -> int:
    """Of input or output number `index`: beyond 32 bits, aligned."""
    return 0x5500_0000_0000 + 0x100 * index


def with_parameter_types(operation: Operation, bundle: KernelBundle) -> KernelBundle:
    """The recording driver wants the parameters' types in the place of machine code."""
    kernels = {}
    for sm, compiled in bundle.kernels.items():
        types = [
            "".join("p" if isinstance(operation.arguments.get(name), str) else "i" for name in kernel.parameters)
            + "p" * kernel.num_hidden_pointers
            for kernel in compiled
        ]
        kernels[sm] = tuple(replace(k, cubin=t.encode() + b"\0") for k, t in zip(compiled, types, strict=True))
    return replace(bundle, kernels=kernels)


def begin_capture(stream: int) -> None:
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert driver.cuStreamBeginCapture(stream, mode) == (driver.CUresult.CUDA_SUCCESS,)


def launch(operation: Operation, bundle: KernelBundle, stream: int) -> None:
    from dspark_trt_plugins.launch import LoadedKernels, workspace_pointers

    names = [tensor.name for tensor in (*operation.inputs, *operation.outputs)]
    pointers = {name: address(index) for index, name in enumerate(names)}
    pointers |= workspace_pointers(operation.workspace, EXTENTS, WORKSPACE)
    LoadedKernels(operation, bundle).enqueue(EXTENTS, pointers, stream)


def launch_by_plugin(
    operation: Operation, bundle: KernelBundle, stream: int, *, is_attached: bool = True, is_captured: bool = False
) -> None:
    from dspark_trt_plugins.trt_plugin import load_tensorrt, make_plugin

    plugin = make_plugin(load_tensorrt("tensorrt_rtx"), operation, bundle)
    if is_attached:
        plugin.attach_to_context(None)  # one of many contexts
        plugin = plugin.attach_to_context(None)
    inputs, outputs = (
        [SimpleNamespace(dims=tensor.shape_in(EXTENTS)) for tensor in tensors]
        for tensors in (operation.inputs, operation.outputs)
    )
    addresses = [address(index) for index in range(len(inputs) + len(outputs))]
    if is_captured:
        plugin.on_shape_change(inputs, outputs)
        begin_capture(stream)
    plugin.enqueue(inputs, outputs, addresses[: len(inputs)], addresses[len(inputs) :], WORKSPACE, stream)


def launch_in_capture(operation: Operation, bundle: KernelBundle, stream: int) -> None:
    """What must not be: the first launch loads."""
    begin_capture(stream)
    launch(operation, bundle, stream)


def main(library: str, way: str, bundle_path: str, stream: str) -> None:
    # its SONAME is that of the real driver, which is not opened then
    recording = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    recording.driver_log.restype = ctypes.c_char_p
    bundle = read_bundle(Path(bundle_path))
    operation = operation_of(bundle.operation, bundle.attributes)
    ways = {
        "launcher": launch,
        "plugin": launch_by_plugin,
        "plugin that a builder times": partial(launch_by_plugin, is_attached=False),
        "plugin in a capture": partial(launch_by_plugin, is_attached=False, is_captured=True),
        "launcher loaded in a capture": launch_in_capture,
    }
    ways[way](operation, with_parameter_types(operation, bundle), int(stream))
    print(recording.driver_log().decode(), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
