"""All operations by the name of their ONNX node: finding them in a graph, registering their TensorRT plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import onnx
from dspark_trt_plugins.bundle import KernelBundle
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.markov_head.launches import MarkovHeadOperation
from dspark_trt_plugins.operation import NAMESPACE, VERSION, Operation, form_from_attributes
from dspark_trt_plugins.page_write.form import PageWriteForm
from dspark_trt_plugins.page_write.launches import PageWriteOperation
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.launches import PrefixSelectOperation
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation
from dspark_trt_plugins.trt_plugin import register, unregister

# the form and the operation of it, by the type of the node
_KINDS: Mapping[str, tuple[type[Any], Callable[[Any], Operation]]] = {
    "MarkovHead": (MarkovHeadForm, MarkovHeadOperation),
    "PageWrite": (PageWriteForm, PageWriteOperation),
    "PrefixSelect": (PrefixSelectForm, PrefixSelectOperation),
    "RowAttention": (RowAttentionForm, RowAttentionOperation),
}
_NOT_OF_THE_FORM = {"plugin_namespace", "plugin_version"}


def operation_of(name: str, attributes: Mapping[str, int | str]) -> Operation:
    """The operation of a node of type `name`. Raises ValueError when the attributes are not those of a form."""
    form_type, make = _KINDS[name]
    return make(form_from_attributes(form_type, attributes))


def operations_in(model: onnx.ModelProto) -> list[Operation]:
    """The operations of all nodes that a plugin can take, each form once: what has to be compiled for this graph.

    Raises ValueError for a node of our domain that is none of ours.
    """
    operations: list[Operation] = []
    for node in model.graph.node:
        if node.domain != NAMESPACE:
            continue
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        version = attributes.get("plugin_version", b"").decode()
        if node.op_type not in _KINDS or version != VERSION:
            raise ValueError(
                f"node {node.name}: expected {NAMESPACE}::{' or '.join(_KINDS)} of version {VERSION}, found "
                f"{NAMESPACE}::{node.op_type} of version {version!r}; export the graph again"
            )
        form = {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in attributes.items()
            if name not in _NOT_OF_THE_FORM
        }
        operation = operation_of(node.op_type, form)
        if operation not in operations:  # layers share their form
            operations.append(operation)
    return operations


def check_kernels(model: onnx.ModelProto, bundles: Sequence[KernelBundle]) -> None:
    """Raises ValueError when a node has no bundle of its form,
    of which the parser would say that it cannot be created."""
    found = [(bundle.operation, dict(bundle.attributes)) for bundle in bundles]
    for operation in operations_in(model):
        if (operation.name, dict(operation.attributes)) not in found:
            raise ValueError(
                f"{operation.name}: expected compiled kernels of {dict(operation.attributes)}, found "
                f"{found or 'none'}; compile them with build_scripts/compile_plugins.py --graph"
            )


def register_plugins(trt: Any, bundles: Sequence[KernelBundle] = ()) -> None:
    """Let `trt` make all plugins. Running an engine needs no bundles; before parsing a graph call `check_kernels`."""
    for name, (form_type, _) in _KINDS.items():
        of_name = [bundle for bundle in bundles if bundle.operation == name]
        register(trt, name, form_type, partial(operation_of, name), of_name)


def unregister_plugins(trt: Any) -> None:
    """From now on the parser inlines the function bodies."""
    for name in _KINDS:
        unregister(trt, name)
