"""What all TensorRT plugins of one form share: the packed kernels that an engine keeps, and the loaded ones."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from dspark_trt_plugins.bundle import KernelBundle
from dspark_trt_plugins.operation import Operation

KERNELS_FIELD = "kernels"


class FormKernels:
    """What all plugins of one form share: an engine has one in every layer, and every context a clone of each."""

    def __init__(self, trt: Any, operation: Operation, bundle: KernelBundle) -> None:
        self.operation = operation
        self._trt = trt
        self.bundle = bundle
        self._loaded: Any = None

    @functools.cached_property
    def fields(self) -> list[tuple[Any, Any]]:
        """Plugin fields, each with the array that it points into. Packing the kernels takes milliseconds."""
        return _fields(self._trt, self.operation, self.bundle)

    def load(self) -> Any:
        """LoadedKernels of the GPU of the CUDA context of the first call; they are never unloaded."""
        from dspark_trt_plugins.launch import LoadedKernels

        if self._loaded is None:
            self._loaded = LoadedKernels(self.operation, self.bundle)
        return self._loaded


def _fields(trt: Any, operation: Operation, bundle: KernelBundle) -> list[tuple[Any, Any]]:
    """Plugin fields, each with the array that it points into."""
    kinds = trt.PluginFieldType
    arrays = {
        name: (np.frombuffer(value.encode(), np.int8), kinds.CHAR)
        if isinstance(value, str)
        else (np.array([value], np.int32), kinds.INT32)
        for name, value in operation.attributes.items()
    }
    arrays[KERNELS_FIELD] = (np.frombuffer(bundle.to_bytes(), np.int8), kinds.INT8)
    return [(trt.PluginField(name, array, kind), array) for name, (array, kind) in arrays.items()]
