"""TensorRT-RTX places PageWrite and RowAttention and hands them the pool as it stands, on a machine without a GPU.

The compiler's listing of layers says which buffers each kernel reads and writes. It is not a measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from dspark_trt_plugins.compile import compile_operation
from dspark_trt_plugins.operation import NAMESPACE, VERSION, workspace_offsets
from dspark_trt_plugins.registry import check_kernels, operations_in, register_plugins, unregister_plugins
from dspark_trt_plugins.trt_plugin import load_tensorrt
from onnx.inliner import inline_local_functions

from tests.support.row_attention_cases import attention_form, paged_model
from tests.support.rtx_graphs import ONE_SM, ListeningLog

NUM_LAYERS = 2
FORM = attention_form(8, 2, 64, 1024, 8, "bfloat16", num_chunk_slots=128)
PAGE = (2, 2, 64, 64)
EXTENTS = {  # smallest, usual, largest
    "T": (1, 8, 128),
    "B": (2, 5, 17),
    "D": (1, 4, 16),
    "S": (1, 8, 8),
    "E": (1, 1, 1),
    "X": (1, 16, 128),
    "P": (2, 64, 257),
}


@dataclass(frozen=True)
class Layer:
    """A kernel of the listing, and names and shapes of what it reads and writes, -1 where the call decides."""

    name: str
    reads: tuple[tuple[str, tuple[int, ...]], ...]
    writes: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Built:
    layer_types: list[str]
    layers: list[Layer]
    scratch_bytes: int
    engine: bytes
    warnings: list[str]


@pytest.fixture(scope="module")
def trt() -> Any:
    return load_tensorrt("tensorrt_rtx")


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return paged_model(FORM, NUM_LAYERS)


@pytest.fixture
def registered(trt: Any, model: onnx.ModelProto) -> Iterator[Any]:
    bundles = [compile_operation(operation, ONE_SM) for operation in operations_in(model)]
    check_kernels(model, bundles)
    register_plugins(trt, bundles)
    yield bundles
    unregister_plugins(trt)


def build(trt: Any, model: onnx.ModelProto, sms: tuple[int, ...] = ONE_SM, *, aliases: bool = True) -> Built:
    log = ListeningLog(trt)
    builder = trt.Builder(log.logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log.logger)
    assert parser.parse(model.SerializeToString()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, aliases)
    config.num_compute_capabilities = len(sms)
    for index, sm in enumerate(sms):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
    profile = builder.create_optimization_profile()
    for value in model.graph.input:
        sizes = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        profile.set_shape(value.name, *([EXTENTS[s][k] if isinstance(s, str) else s for s in sizes] for k in range(3)))
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None, log.problems
    types = [str(network.get_layer(index).type).rpartition(".")[2] for index in range(network.num_layers)]
    text = "\n".join(log.messages)
    scratch = max(map(int, re.findall(r"Max Scratch Memory: (\d+) bytes", text)))
    return Built(types, list(_listed(text)), scratch, bytes(engine), list(log.problems))


def _listed(text: str) -> Iterator[Layer]:
    for line in text.splitlines():
        if found := re.match(r"Name: (.+?), LayerType: ", line):
            reads, _, writes = line.partition("Outputs: [")
            yield Layer(found.group(1), _tensors(reads), _tensors(writes))


def _tensors(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found = re.findall(r"Name: ([^,]+),(?: Location: Device,)? Dimensions: \[([-\d,]*)\]", text)
    return tuple((name, tuple(int(size) for size in sizes.split(",") if size)) for name, sizes in found)


def test_nodes_become_plugin_layers_that_share_their_kernels(trt: Any, model: onnx.ModelProto, registered: Any) -> None:
    built = build(trt, model)
    assert built.layer_types.count("PLUGIN_V3") == 2 * NUM_LAYERS
    assert "ATTENTION_INPUT" not in built.layer_types
    assert built.warnings == []
    assert all(bundle.to_bytes() in built.engine for bundle in registered)


def test_plugins_read_and_write_the_pool_in_place(trt: Any, model: onnx.ModelProto, registered: Any) -> None:
    """Under its own names, which are bound memory; and nothing else makes something of the size of a pool."""
    layers = build(trt, model).layers
    read = [(layer.name, name) for layer in layers for name, shape in layer.reads if shape[1:] == PAGE]
    made = [(layer.name, name) for layer in layers for name, shape in layer.writes if shape[1:] == PAGE]
    assert sorted(name for _, name in read) == ["pages.0", "pages.0.out", "pages.1", "pages.1.out"]
    assert sorted(made) == [("PageWrite.0", "pages.0.out"), ("PageWrite.1", "pages.1.out")]


def test_writing_in_place_has_to_be_switched_on(trt: Any, model: onnx.ModelProto, registered: Any) -> None:
    with pytest.raises(AssertionError, match=r"Aliased I/O used by plugin PageWrite\.\d but PreviewFe"):
        build(trt, model, aliases=False)


def test_layers_share_one_workspace(trt: Any, model: onnx.ModelProto, registered: Any) -> None:
    """What the compiler wants besides inputs and outputs: one workspace, and queries between layers."""
    built = build(trt, paged_model(FORM, 6))
    _, workspace = workspace_offsets(operations_in(model)[1].workspace, {})
    assert workspace < built.scratch_bytes < 2 * workspace


def test_without_the_plugin_the_body_becomes_native_attention(trt: Any, model: onnx.ModelProto) -> None:
    unregister_plugins(trt)  # of a runtime that other tests opened in this process
    built = build(trt, inline_local_functions(model))  # the parser warns of names where a function is called twice
    assert built.layer_types.count("ATTENTION_INPUT") == NUM_LAYERS
    assert "PLUGIN_V3" not in built.layer_types
    assert [each for each in built.warnings if "used only at compile-time" not in each] == []


def test_an_engine_gives_the_plugin_back_as_it_was(trt: Any, model: onnx.ModelProto, registered: Any) -> None:
    _, operation = operations_in(model)
    creator = trt.get_plugin_registry().get_creator(operation.name, VERSION, NAMESPACE)
    fields = [_field(trt, name, value) for name, value in operation.attributes.items()]
    made = creator.create_plugin("built", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
    read = creator.create_plugin("read", made.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
    assert read.operation == operation
    assert read.kernels.bundle.to_bytes() == registered[1].to_bytes()
    others = [
        creator.create_plugin("of another layer", made.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME),
        read.clone(),
        read.clone().clone(),
    ]
    assert {id(each.kernels) for each in others} == {id(read.kernels)}, "unpacked once, packed once, loaded once"
    assert others[0].get_fields_to_serialize() is not None


def _field(trt: Any, name: str, value: int | str) -> Any:
    if isinstance(value, str):
        return trt.PluginField(name, np.frombuffer(value.encode(), np.int8), trt.PluginFieldType.CHAR)
    return trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32)
