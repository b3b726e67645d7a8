"""Inputs and outputs of the graph that selects drafts: those of `dspark::PrefixSelect`, by their names."""

from __future__ import annotations

from dspark_trt_plugins.operation import Tensor
from dspark_trt_plugins.prefix_select.launches import PrefixSelectOperation

from dspark_trt.contract.bindings import Binding
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.forms import select_form


def select_inputs(dims: DrafterDims) -> tuple[Binding, ...]:
    return tuple(_binding(tensor) for tensor in PrefixSelectOperation(select_form(dims)).inputs)


def select_outputs(dims: DrafterDims) -> tuple[Binding, ...]:
    return tuple(_binding(tensor) for tensor in PrefixSelectOperation(select_form(dims)).outputs)


def _binding(tensor: Tensor) -> Binding:
    assert tensor.element_type != "int32", "the index tensors of a graph are int64"
    return Binding(tensor.name, tensor.element_type, tensor.shape)
