"""TensorRT-RTX builds engines with MarkovHead and PrefixSelect, and inlines their function bodies without,
on a machine without a GPU.

Seen here: parsing, the contract of the plugins with the builder, layer types, code for each architecture in the engine.
Not seen: that an engine runs, for which RTX wants a driver.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from dspark_trt_plugins.bundle import KernelBundle, read_bundle
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.operation import NAMESPACE, VERSION
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.registry import check_kernels, operations_in, register_plugins, unregister_plugins
from dspark_trt_plugins.trt_plugin import load_tensorrt

from dspark_trt.engines.tensorrt.library import BuildLog
from tests.support.plugin_graphs import draft_and_select_model

REPOSITORY = Path(__file__).parents[3]
SMS = (80, 86, 89, 120)
EXTENTS = {"R": (1, 8, 64), "B": (1, 8, 64), "T": (1, 32, 512)}  # smallest, usual, largest
HEADS = {
    "vanilla": MarkovHeadForm(3, 1000, 16, "vanilla", hidden_size=64, weight_type="bfloat16"),
    "gated": MarkovHeadForm(3, 1000, 20, "gated", hidden_size=64, weight_type="float16", logits_type="float16"),
    "rnn": MarkovHeadForm(3, 1000, 16, "rnn", hidden_size=64),
    "no head": MarkovHeadForm(3, 1000, 0, hidden_size=64, weight_type="float16"),
    "top n": MarkovHeadForm(3, 1000, 16, "vanilla", hidden_size=64, weight_type="bfloat16", top_n=50),
}


@pytest.fixture(scope="module")
def trt() -> Any:
    return load_tensorrt("tensorrt_rtx")


@pytest.fixture
def model(request: pytest.FixtureRequest) -> onnx.ModelProto:
    return draft_and_select_model(HEADS[request.param], PrefixSelectForm(3))


def compile_kernels(model: onnx.ModelProto, folder: Path) -> list[KernelBundle]:
    """By the script that users have."""
    onnx.save(model, folder / "model.onnx")
    script = REPOSITORY / "build_scripts" / "compile_plugins.py"
    command = [sys.executable, str(script), "--graph", str(folder / "model.onnx"), "--output", str(folder)]
    for sm in SMS:
        command += ["--sm", str(sm)]
    subprocess.run(command, check=True, capture_output=True)
    return [read_bundle(path) for path in sorted(folder.glob("*.kernels"))]


def build(trt: Any, model: onnx.ModelProto, log: BuildLog) -> tuple[list[Any], bytes]:
    """Layer types and the engine, for all architectures at once."""
    builder = trt.Builder(log.logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log.logger)
    assert parser.parse(model.SerializeToString()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(SMS)
    for index, sm in enumerate(SMS):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
    profile = builder.create_optimization_profile()
    for value in model.graph.input:
        sizes = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        shapes = [[EXTENTS[size][k] if isinstance(size, str) else size for size in sizes] for k in range(3)]
        profile.set_shape(value.name, *shapes)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None, log.problems
    return [network.get_layer(index).type for index in range(network.num_layers)], bytes(engine)


@pytest.fixture
def registered(trt: Any) -> Iterator[None]:
    register_plugins(trt)
    yield
    unregister_plugins(trt)


@pytest.mark.parametrize("model", HEADS, indirect=True)
def test_nodes_become_plugin_layers_and_the_engine_holds_their_kernels(
    trt: Any, model: onnx.ModelProto, registered: None, tmp_path: Path
) -> None:
    bundles = compile_kernels(model, tmp_path)
    register_plugins(trt, bundles)
    log = BuildLog(trt)
    layers, engine = build(trt, model, log)
    assert layers.count(trt.LayerType.PLUGIN_V3) == 2
    assert {str(layer).removeprefix("LayerType.") for layer in layers} <= {
        "PLUGIN_V3",
        "MATRIX_MULTIPLY",
        "CONSTANT",
        "CAST",
        "SHUFFLE",
        "UNSQUEEZE",
    }
    assert log.problems == ()
    for bundle in bundles:
        assert sorted(bundle.kernels) == list(SMS)
        assert bundle.to_bytes() in engine


@pytest.mark.parametrize("model", HEADS, indirect=True)
def test_without_plugins_the_function_bodies_become_native_layers(trt: Any, model: onnx.ModelProto) -> None:
    unregister_plugins(trt)  # of a runtime that other tests opened in this process
    log = BuildLog(trt)
    layers, engine = build(trt, model, log)
    assert trt.LayerType.PLUGIN_V3 not in layers
    assert layers.count(trt.LayerType.TOPK) >= 3
    assert len(engine) > 0
    assert log.problems == ()


def test_a_graph_whose_kernels_are_missing_is_refused(trt: Any, registered: None, tmp_path: Path) -> None:
    model = draft_and_select_model(HEADS["vanilla"], PrefixSelectForm(3))
    other = draft_and_select_model(HEADS["vanilla"], PrefixSelectForm(2))
    bundles = compile_kernels(other, tmp_path)
    check_kernels(other, bundles)
    with pytest.raises(ValueError, match=r"PrefixSelect: expected compiled kernels of .*gamma': 3"):
        check_kernels(model, bundles)
    register_plugins(trt, bundles)
    with pytest.raises(AssertionError, match="Could not create the plugin"):
        build(trt, model, BuildLog(trt))


def test_an_engine_gives_a_plugin_back_as_it_was(trt: Any, registered: None, tmp_path: Path) -> None:
    """The fields that the builder writes are those that the runtime's creator reads."""
    model = draft_and_select_model(HEADS["top n"], PrefixSelectForm(3))
    bundles = {bundle.operation: bundle for bundle in compile_kernels(model, tmp_path)}
    register_plugins(trt, list(bundles.values()))
    for operation in operations_in(model):
        creator = trt.get_plugin_registry().get_creator(operation.name, VERSION, NAMESPACE)
        fields = [_field(trt, name, value) for name, value in operation.attributes.items()]
        built = creator.create_plugin("built", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
        read = creator.create_plugin("read", built.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
        assert read.operation == operation
        assert read.kernels.bundle.to_bytes() == bundles[operation.name].to_bytes()


def test_missing_and_old_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # as if it were not installed
    with pytest.raises(ImportError, match="expected the package tensorrt, found none"):
        load_tensorrt("tensorrt")
    assert load_tensorrt().__name__ == "tensorrt_rtx"
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.14.1.48"))
    with pytest.raises(ImportError, match=r"expected tensorrt 11\.1 or later, found 10\.14\.1\.48"):
        load_tensorrt()
    later = SimpleNamespace(__version__="11.1.0.106")
    monkeypatch.setitem(sys.modules, "tensorrt", later)
    assert load_tensorrt() is later


def test_a_module_imported_too_early_is_refused_before_a_plugin_node_ends_the_process() -> None:
    script = (
        "import tensorrt_rtx\nfrom dspark_trt_plugins.trt_plugin import load_tensorrt\nload_tensorrt('tensorrt_rtx')"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ImportError: tensorrt_rtx was imported before" in result.stderr


def _field(trt: Any, name: str, value: int | str) -> Any:
    if isinstance(value, str):
        return trt.PluginField(name, np.frombuffer(value.encode(), np.int8), trt.PluginFieldType.CHAR)
    return trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32)
