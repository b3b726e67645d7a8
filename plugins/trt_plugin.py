"""TensorRT plugins made of operations: one class for all, for `tensorrt` (11.1 or later) and for `tensorrt_rtx`.

A plugin is placed by the ONNX parser: a node of domain `dspark` whose attributes `plugin_namespace` and
`plugin_version` match a registered creator. The attributes of the form reach the creator as fields. The engine keeps
them and the kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from dspark_trt_plugins.bundle import KernelBundle, bundle_from_bytes
from dspark_trt_plugins.form_kernels import KERNELS_FIELD, FormKernels
from dspark_trt_plugins.operation import NAMESPACE, VERSION, Operation, extents_of, workspace_offsets
from dspark_trt_plugins.rtx_soname import provide_library_name

FULL = "tensorrt"
RTX = "tensorrt_rtx"
MINIMUM_VERSION = (11, 1)  # of tensorrt: strongly typed networks only, attention with lengths

OperationFactory = Callable[[Mapping[str, int | str]], Operation]  # from the attributes of a form


def load_tensorrt(name: str | None = None) -> Any:
    """The module `tensorrt` or `tensorrt_rtx`; without a name the first that can be imported.

    Raises ImportError when there is none, or `tensorrt` is older than 11.1.
    """
    for candidate in (FULL, RTX) if name is None else (name,):
        if candidate == RTX:
            provide_library_name()
        try:
            trt = importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name != candidate:
                raise
            continue
        found = tuple(int(part) for part in trt.__version__.split(".")[:2])
        if candidate == FULL and found < MINIMUM_VERSION:
            wanted = ".".join(map(str, MINIMUM_VERSION))
            raise ImportError(f"expected {FULL} {wanted} or later, found {trt.__version__}; install a later one")
        return trt
    raise ImportError(
        f"expected the package {name or f'{FULL} or {RTX}'}, found none; see the README for the install line"
    )


def register(
    trt: Any, name: str, form_type: type[Any], factory: OperationFactory, bundles: Sequence[KernelBundle]
) -> None:
    """Let the parser and the runtime of `trt` make plugins of one operation;
    kernels are looked up in `bundles` by form.

    Registering again replaces the bundles. A runtime needs none: an engine has its own.
    """
    creators = _registered(trt)
    if name not in creators:
        creator = _classes(trt)[1](name, form_type, factory)
        if not trt.get_plugin_registry().register_creator(creator, NAMESPACE):
            raise RuntimeError(f"TensorRT refused the plugin creator {NAMESPACE}::{name}")
        creators[name] = creator
    creators[name].bundles = tuple(bundles)
    creators[name].of_bundles.clear()


def unregister(trt: Any, name: str) -> None:
    """From now on the parser inlines the function body of such nodes. Does nothing where it was not registered."""
    if (creator := _registered(trt).pop(name, None)) is not None:
        trt.get_plugin_registry().deregister_creator(creator)


def make_plugin(trt: Any, operation: Operation, bundle: KernelBundle) -> Any:
    """A plugin as the parser gets it."""
    return _classes(trt)[0](FormKernels(trt, operation, bundle))


@functools.cache
def _registered(trt: Any) -> dict[str, Any]:
    """Creators by name. TensorRT keeps no reference to them."""
    return {}


@functools.cache
def _classes(trt: Any) -> tuple[type, type]:
    """Plugin and creator, subclasses of the module's own interfaces."""
    element_types = {
        "int32": trt.int32,
        "int64": trt.int64,
        "float16": trt.float16,
        "bfloat16": trt.bfloat16,
        "float32": trt.float32,
    }

    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):  # type: ignore[misc]
        """One operation as a TensorRT plugin: linear formats, element types of the form, workspace as the operation
        says, and outputs that are an input's memory where it says so."""

        def __init__(self, kernels: FormKernels) -> None:
            for base in Plugin.__bases__:
                base.__init__(self)
            self.operation = kernels.operation
            self.plugin_name = self.operation.name
            self.plugin_namespace = NAMESPACE
            self.plugin_version = VERSION
            self.num_outputs = len(self.operation.outputs)
            self.kernels = kernels

        def get_capability_interface(self, capability: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self.kernels)

        def get_output_data_types(self, input_types: Any) -> list[Any]:
            return [element_types[tensor.element_type] for tensor in self.operation.outputs]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> list[Any]:
            sources = {
                size: inputs[index][axis]
                for index, tensor in enumerate(self.operation.inputs)
                for axis, size in enumerate(tensor.shape)
                if isinstance(size, str)
            }
            shapes = []
            for tensor in self.operation.outputs:
                shape = trt.DimsExprs(len(tensor.shape))
                for axis, size in enumerate(tensor.shape):
                    shape[axis] = sources[size] if isinstance(size, str) else builder.constant(size)
                shapes.append(shape)
            return shapes

        def supports_format_combination(self, position: int, descriptions: Any, num_inputs: int) -> bool:
            tensor = (*self.operation.inputs, *self.operation.outputs)[position]
            found = descriptions[position].desc
            return bool(found.format == trt.TensorFormat.LINEAR and found.type == element_types[tensor.element_type])

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            extents_of(self.operation.inputs, [list(description.max) for description in inputs])

        def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
            extents = extents_of(self.operation.inputs, [list(description.max) for description in inputs])
            return workspace_offsets(self.operation.workspace, extents)[1]

        def get_aliased_input(self, output_index: int) -> int:
            """-1: the output has memory of its own."""
            alias_of = self.operation.outputs[output_index].alias_of
            names = [tensor.name for tensor in self.operation.inputs]
            return -1 if alias_of is None else names.index(alias_of)

        def get_valid_tactics(self) -> list[int]:
            return []

        def set_tactic(self, tactic: int) -> None:
            """There is one tactic."""

        def get_fields_to_serialize(self) -> Any:
            return trt.PluginFieldCollection([field for field, _ in self.kernels.fields])

        def attach_to_context(self, context: Any) -> Any:
            """Kernels are loaded by `on_shape_change`: a builder without a GPU attaches plugins with aliases too."""
            return self.clone()

        def on_shape_change(self, inputs: Any, outputs: Any) -> None:
            extents_of(self.operation.inputs, [list(description.dims) for description in inputs])
            self.kernels.load()  # before any enqueue, which a capture may hold; a builder need not attach the plugin

        def enqueue(
            self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
        ) -> None:
            from dspark_trt_plugins.launch import workspace_pointers

            operation = self.operation
            extents = extents_of(operation.inputs, [list(description.dims) for description in input_desc])
            names = [tensor.name for tensor in (*operation.inputs, *operation.outputs)]
            pointers = dict(zip(names, (*inputs, *outputs), strict=True))
            pointers |= workspace_pointers(operation.workspace, extents, workspace)
            self.kernels.load().enqueue(extents, pointers, stream)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self, name: str, form_type: type[Any], factory: OperationFactory) -> None:
            super().__init__()
            self.name = name
            self.plugin_namespace = NAMESPACE
            self.plugin_version = VERSION
            self.field_names = trt.PluginFieldCollection(_declared_fields(trt, form_type))
            self.factory = factory
            self.bundles: tuple[KernelBundle, ...] = ()
            self.of_bundles: dict[int, FormKernels] = {}
            self._of_engines: dict[tuple[Any, ...], FormKernels] = {}  # layers of a form share its kernels

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            """Raises ValueError when the fields are no form or there are no kernels for it."""
            values = {field.name: field for field in fields}
            kernels = values.pop(KERNELS_FIELD, None)
            operation = self.factory({field.name: _field_value(trt, field) for field in values.values()})
            form = tuple(sorted(operation.attributes.items()))
            if kernels is not None:
                data = np.asarray(kernels.data, np.int8).tobytes()
                if (form, data) not in self._of_engines:
                    bundle = bundle_from_bytes(data, f"kernels of {name} in the engine")
                    self._of_engines[form, data] = FormKernels(trt, operation, bundle)
                return Plugin(self._of_engines[form, data])
            for index, bundle in enumerate(self.bundles):
                if dict(bundle.attributes) == dict(operation.attributes):
                    return Plugin(self.of_bundles.setdefault(index, FormKernels(trt, operation, bundle)))
            raise ValueError(f"{name}: expected kernels of {dict(operation.attributes)} among the registered bundles")

    return Plugin, Creator


def _declared_fields(trt: Any, form_type: type[Any]) -> list[Any]:
    """Names and types of the node's attributes; the parser hands over no others."""
    kinds = trt.PluginFieldType
    nothing = np.array([], np.int32)
    return [
        trt.PluginField(field.name, nothing, kinds.INT32 if field.type in ("int", "bool") else kinds.CHAR)
        for field in dataclasses.fields(form_type)
    ]


def _field_value(trt: Any, field: Any) -> int | str:
    if field.type == trt.PluginFieldType.CHAR:
        return bytes(np.asarray(field.data, np.int8)).decode().rstrip("\0")
    return int(np.asarray(field.data).ravel()[0])
