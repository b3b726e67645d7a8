"""TensorRT-RTX places RowAttention behind its KV update and hands it the caches as they stand,
on a machine without a GPU.

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
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.trt_plugin import load_tensorrt
from onnx.inliner import inline_local_functions

from tests.support.row_attention_cases import cached_model
from tests.support.rtx_graphs import ListeningLog

SMS = (80, 86, 89, 120)
NUM_LAYERS = 2
FORM = RowAttentionForm(8, 2, 64, 1024, 8, "bfloat16")
EXTENTS = {"B": (1, 4, 16), "S": (1, 8, 8)}  # smallest, usual, largest


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
    return cached_model(FORM, NUM_LAYERS)


@pytest.fixture
def registered(trt: Any, model: onnx.ModelProto) -> Iterator[Any]:
    (operation,) = operations_in(model)
    bundle = compile_operation(operation, SMS)
    check_kernels(model, [bundle])
    register_plugins(trt, [bundle])
    yield bundle
    unregister_plugins(trt)


def build(trt: Any, model: onnx.ModelProto, sms: tuple[int, ...] = SMS) -> Built:
    log = ListeningLog(trt)
    builder = trt.Builder(log.logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log.logger)
    assert parser.parse(model.SerializeToString()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
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
    found = re.findall(r"Name: ([^,]+), Dimensions: \[([-\d,]*)\]", text)
    return tuple((name, tuple(int(size) for size in sizes.split(",") if size)) for name, sizes in found)


def test_nodes_become_plugin_layers_that_share_their_kernels(trt: Any, model: onnx.ModelProto, registered: Any) -> None:
    built = build(trt, model)
    assert built.layer_types.count("PLUGIN_V3") == NUM_LAYERS
    assert built.layer_types.count("KV_CACHE_UPDATE") == 2 * NUM_LAYERS
    assert "ATTENTION_INPUT" not in built.layer_types
    assert built.warnings == []
    assert sorted(registered.kernels) == list(SMS)
    assert registered.to_bytes() in built.engine


@pytest.mark.parametrize("sm", SMS)
def test_the_plugin_reads_the_caches_in_place(sm: int, trt: Any, model: onnx.ModelProto, registered: Any) -> None:
    """Under their own names, which are bound memory; and nothing else makes something of the size of a cache."""
    layers = build(trt, model, (sm,)).layers
    plugins = [layer for layer in layers if any(name.startswith("attended") for name, _ in layer.writes)]
    assert len(plugins) == NUM_LAYERS, layers
    cache = (-1, FORM.num_kv_heads, FORM.capacity, FORM.head_dim)
    for layer in plugins:
        read = [(name, shape) for name, shape in layer.reads if FORM.capacity in shape]
        assert [shape for _, shape in read] == [cache, cache]
        assert all(name.startswith(("keys", "values")) for name, _ in read), read
    made = [(layer.name, name) for layer in layers for name, shape in layer.writes if FORM.capacity in shape]
    assert [name for _, name in made if not name.startswith(("keys", "values"))] == []


def test_layers_share_one_workspace(trt: Any, model: onnx.ModelProto, registered: Any) -> None:
    """What the compiler wants besides inputs and outputs: one workspace, and queries between layers."""
    built = build(trt, cached_model(FORM, 6), (120,))
    largest = {name: size[2] for name, size in EXTENTS.items()}
    _, workspace = workspace_offsets(operations_in(model)[0].workspace, largest)
    assert workspace < built.scratch_bytes < 2 * workspace


def test_without_the_plugin_the_body_becomes_native_attention(trt: Any, model: onnx.ModelProto) -> None:
    unregister_plugins(trt)  # of a runtime that other tests opened in this process
    built = build(
        trt, inline_local_functions(model), (89,)
    )  # the parser warns of names where a function is called twice
    assert built.layer_types.count("ATTENTION_INPUT") == NUM_LAYERS
    assert "PLUGIN_V3" not in built.layer_types
    assert built.warnings == []


def test_an_engine_gives_the_plugin_back_as_it_was(trt: Any, model: onnx.ModelProto, registered: Any) -> None:
    (operation,) = operations_in(model)
    creator = trt.get_plugin_registry().get_creator(operation.name, VERSION, NAMESPACE)
    fields = [_field(trt, name, value) for name, value in operation.attributes.items()]
    made = creator.create_plugin("built", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
    read = creator.create_plugin("read", made.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
    assert read.operation == operation
    assert read.kernels.bundle.to_bytes() == registered.to_bytes()
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
