"""The select graph: the `dspark::PrefixSelect` node, between draft and verification on a device."""

from __future__ import annotations

from pathlib import Path

from dspark_trt_plugins.prefix_select.function_body import prefix_select_function, prefix_select_node

from dspark_trt.checkpoints.spec import DrafterSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import drafter_dims, to_metadata
from dspark_trt.contract.forms import select_form
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.select_bindings import select_inputs, select_outputs
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.limits import check_limits
from dspark_trt.graphs.numbers import numbers_of


def write_select_graph(drafter: DrafterSpec, folder: Path, *, limits: EngineLimits, precision: Precision) -> None:
    """Write prefix_select.onnx into `folder`: inputs and outputs of `select_bindings`.

    It has no weights and no 16-bit numbers; `precision` enters the metadata alone, which is that of the drafter's
    graphs.
    Raises ExportError when a limit does not fit the drafter.
    """
    check_limits(limits, drafter.decoder, gamma=drafter.gamma, what="drafter")
    numbers = numbers_of(precision, "standard")
    dims = drafter_dims(drafter, limits=limits, attention="standard", element_type=numbers.model)
    builder = GraphBuilder("prefix_select")
    form = select_form(dims)
    inputs = [builder.input(binding) for binding in select_inputs(dims)]
    outputs = [builder.output(binding) for binding in select_outputs(dims)]
    builder.node(prefix_select_node(form, inputs, outputs), prefix_select_function(form))
    builder.save(folder / bindings.SELECT_GRAPH, to_metadata(dims))
