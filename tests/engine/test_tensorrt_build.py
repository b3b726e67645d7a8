"""What a build for TensorRT refuses, and that it can: each refusal is provoked with the real compiler."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.registry import unregister_plugins
from onnx import TensorProto, helper

from dspark_trt.contract import bindings
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.tensorrt.compiler.build import CompileSettings, GraphCompiler, compile_graphs
from dspark_trt.engines.tensorrt.compiler.facts import engine_path, read_facts
from dspark_trt.engines.tensorrt.compiler.network import check_layers, parse_graph
from dspark_trt.engines.tensorrt.library import BuildLog, import_library
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError
from dspark_trt.machine import cpu
from tests.support.factories import write_drafter, write_target
from tests.support.plugin_graphs import draft_and_select_model
from tests.support.rtx_graphs import ListeningLog, Pair, compile_some, export
from tests.support.wide_products import NUM_OUTPUTS, NUM_TERMS, wide_product

ONLY_SELECT = (bindings.SELECT_GRAPH,)
RTX_89 = CompileSettings("tensorrt_rtx", (89,))
CACHE = "decode.key_cache.0"


@pytest.fixture(scope="module")
def trt() -> Any:
    return import_library("tensorrt_rtx")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    target = write_target(folder / "target", layers=1, hidden=64)
    return target, write_drafter(folder / "drafter", target, layers=1, taps=(0,))


@pytest.fixture(scope="module")
def pair(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return export(*checkpoints, tmp_path_factory.mktemp("pair") / "graphs", EngineLimits(2, 32, 16), "bf16")


def attention_model(*, inputs: list[str]) -> onnx.ModelProto:
    """Keys enter a cache by an operator and are attended to, as values too."""
    cache, step = ["B", 2, 64, 16], ["B", 2, "S", 16]
    given = [("query", step), ("key", step), (CACHE, cache)]
    lengths = [("past", TensorProto.INT64, ["B"]), ("lengths", TensorProto.INT64, ["B"])]
    nodes = [
        helper.make_node("TensorScatter", [CACHE, "key", "past"], [f"{CACHE}.out"], axis=2),
        helper.make_node("Attention", inputs, ["attended"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name, shape in given]
    values += [helper.make_tensor_value_info(*value) for value in lengths]
    outputs = [helper.make_tensor_value_info("attended", TensorProto.FLOAT16, step)]
    outputs.append(helper.make_tensor_value_info(f"{CACHE}.out", TensorProto.FLOAT16, cache))
    graph = helper.make_graph(nodes, "attention", values, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def parsed(trt: Any, model: onnx.ModelProto) -> Any:
    log = BuildLog(trt)
    return parse_graph(trt, trt.Builder(log.logger), model, Path("attention.onnx"), log)[0]


def test_every_build_of_a_process_hears_what_the_compiler_says(trt: Any) -> None:
    """TensorRT ignores all loggers but the first one that is alive: a second build would be deaf to "Unused Input"."""
    first = BuildLog(trt)
    builder = trt.Builder(first.logger)
    second = BuildLog(trt)
    fail_to_parse(trt, trt.Builder(second.logger), second)
    assert second.problems != ()
    assert first.problems == (), "the youngest alone is told"
    del second
    fail_to_parse(trt, builder, first)
    assert first.problems != ()


def fail_to_parse(trt: Any, builder: Any, log: BuildLog) -> None:
    network = builder.create_network()
    parser = trt.OnnxParser(network, log.logger)
    assert not parser.parse(b"no graph")


def test_what_the_parser_drops_is_an_error(trt: Any) -> None:
    """It knows no nonpad_kv_seqlen, parses without a word, and would attend to the whole cache."""
    keys = f"{CACHE}.out"
    model = attention_model(inputs=["query", keys, keys, "", "", "", "lengths"])
    network = parsed(trt, model)
    with pytest.raises(
        EngineBuildError, match=r"attention\.onnx: .*expected Attention with a mask alone, found \['lengths'\]"
    ):
        check_layers(network, model, "attention.onnx", use_plugins=True)
    model = attention_model(inputs=["query", keys, keys])
    with pytest.raises(EngineBuildError, match=r"attention\.onnx: .*no layer reads \['lengths'\]"):
        check_layers(network, model, "attention.onnx", use_plugins=True)
    model.graph.node[-1].attribute.append(helper.make_attribute("is_causal", 1))
    with pytest.raises(EngineBuildError, match=r"found \['is_causal'\]"):
        check_layers(network, model, "attention.onnx", use_plugins=True)


@pytest.mark.parametrize(
    "warning",
    [
        "ModelImporter.cpp:653: UNUSED INPUT: lengths",
        "Unused Input: lengths",
        "onnxOpImporters.cpp:1902: axis attribute is ignored by this operator",
        "onnx2trt_utils.cpp:400: One or more weights outside the range of INT32 was clamped",
        "Attribute softcap is not supported; using the default value",
        "Unsupported attribute alpha",
        "Values were truncated to 32 bits",
    ],
)
def test_a_warning_that_something_else_is_computed_ends_the_build(
    trt: Any, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warning: str
) -> None:
    compiler = GraphCompiler(RTX_89, tmp_path)
    make_parser_say(trt, warning, monkeypatch)
    with pytest.raises(
        EngineBuildError, match=r"select\.onnx: tensorrt_rtx 1\.7\S* would not compute what the graph says"
    ):
        compile_some(pair.graphs, compiler, ONLY_SELECT)


def make_parser_say(trt: Any, remark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real parser, which has something to say besides."""
    parser_type = trt.OnnxParser

    class RemarkingParser:
        def __init__(self, network: Any, logger: Any) -> None:
            self.parser = parser_type(network, logger)
            self.logger = logger

        def parse(self, *arguments: Any) -> bool:
            self.logger.log(trt.ILogger.WARNING, remark)
            return bool(self.parser.parse(*arguments))

        @property
        def num_errors(self) -> int:
            return int(self.parser.num_errors)

    monkeypatch.setattr(trt, "OnnxParser", RemarkingParser)


def test_a_harmless_warning_is_logged_and_kept(
    trt: Any, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A later version of a parser may say more than this one."""
    remark = "ModelImporter.cpp:1: this operator has a newer form"
    compiler = GraphCompiler(RTX_89, tmp_path)
    make_parser_say(trt, remark, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="dspark_trt"):
        compile_some(pair.graphs, compiler, ONLY_SELECT)
    assert remark in caplog.text
    assert read_facts(tmp_path, bindings.SELECT_GRAPH).warnings == (remark,)


def test_an_operator_that_it_does_not_know_is_an_error(trt: Any) -> None:
    model = attention_model(inputs=["query", "key", "key"])
    model.graph.node[-1].op_type = "StringNormalizer"
    with pytest.raises(EngineBuildError, match=r"attention\.onnx: .* cannot parse the graph: .*StringNormalizer"):
        parsed(trt, model)


def test_a_cache_that_is_not_its_own_output_is_an_error(trt: Any) -> None:
    model = attention_model(inputs=["query", "updated", "updated"])
    model.graph.node[0].output[0] = "updated"
    model.graph.node.insert(1, helper.make_node("Identity", ["updated"], [f"{CACHE}.out"]))
    del model.graph.input[-1]  # unused
    with pytest.raises(EngineBuildError, match=r"expected every cache to be written in place"):
        check_layers(parsed(trt, model), model, "attention.onnx", use_plugins=True)


def test_a_node_that_the_plugin_did_not_take_is_an_error(trt: Any) -> None:
    unregister_plugins(trt)
    model = draft_and_select_model(MarkovHeadForm(3, 100, 16, hidden_size=64), PrefixSelectForm(3))
    network = parsed(trt, model)
    check_layers(network, model, "draft.onnx", use_plugins=False)
    with pytest.raises(EngineBuildError, match=r"draft\.onnx: expected 2 plugin layers for .*, found 0"):
        check_layers(network, model, "draft.onnx", use_plugins=True)


def test_a_failing_build_says_what_the_compiler_said(pair: Pair, tmp_path: Path) -> None:
    settings = CompileSettings("tensorrt_rtx", (75,), use_plugins=False)  # which has no bfloat16
    with pytest.raises(
        EngineBuildError, match=r"target\.onnx: tensorrt_rtx 1\.7\S* cannot compile .* SM 75: .*sm75.*b16"
    ):
        compile_some(pair.graphs, GraphCompiler(settings, tmp_path), [bindings.TARGET_GRAPH])
    assert list(tmp_path.iterdir()) == []


def test_progress_rises_to_the_end_and_an_interruption_ends_the_build(pair: Pair, tmp_path: Path) -> None:
    told: list[float] = []
    (tmp_path / "none").mkdir()
    compile_graphs(pair.graphs, tmp_path, RTX_89, progress=told.append)
    assert told == sorted(told)
    assert len(set(told)) > 100
    assert told[-1] == 1.0
    with pytest.raises(KeyboardInterrupt):
        compile_graphs(pair.graphs, tmp_path / "none", RTX_89, progress=interrupt_beyond(0.15))
    assert not engine_path(tmp_path / "none", bindings.TARGET_GRAPH).exists()


def interrupt_beyond(limit: float) -> Callable[[float], None]:
    def progress(fraction: float) -> None:
        if fraction > limit:
            raise KeyboardInterrupt

    return progress


def test_casts_around_a_product_of_float16_become_a_part_of_it(trt: Any) -> None:
    """The wish for float32 sums: one product that reads float16, and weights that are kept in float16."""
    model, _, _ = wide_product()
    log = ListeningLog(trt)
    builder = trt.Builder(log.logger)
    network, _ = parse_graph(trt, builder, model, Path("product.onnx"), log)
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    profile.set_shape("x", (1, NUM_TERMS), (8, NUM_TERMS), (64, NUM_TERMS))
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    lines = [line for message in log.messages for line in message.splitlines() if line.startswith("Name: ")]
    kernels = [line for line in lines if "shape_call" not in line and "Dimensions" in line]
    assert [re.findall(r"LayerType: (\w+)", line) for line in kernels] == [["gemm"]]
    assert re.findall(r"Datatype: (\w+)", kernels[0].partition("Constants")[0]) == ["Half"]
    weight_bytes = NUM_TERMS * NUM_OUTPUTS * 2
    assert weight_bytes < engine.nbytes < 1.1 * weight_bytes


def test_facts_are_read_back(pair: Pair, tmp_path: Path) -> None:
    compiler = GraphCompiler(CompileSettings("tensorrt_rtx", (120, 89, 89)), tmp_path)
    compile_some(pair.graphs, compiler, ONLY_SELECT)
    facts = read_facts(tmp_path, bindings.SELECT_GRAPH)
    assert (facts.sms, facts.library, facts.layers) == ((89, 120), "tensorrt_rtx", {"PLUGIN_V3": 1})
    assert [profile.name for profile in facts.profiles] == ["select"]
    with pytest.raises(EngineBuildError, match=r"target\.json cannot be read.*run `dspark-trt build` again"):
        read_facts(tmp_path, bindings.TARGET_GRAPH)


def test_graphs_that_are_missing_or_of_another_backend_are_refused(
    pair: Pair, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    in_float32 = export(*checkpoints, tmp_path / "graphs", EngineLimits(2, 32, 16), "fp32")
    with pytest.raises(EngineBuildError, match=r"expected paged attention in bf16 or fp16, .* found paged in float32"):
        compile_graphs(in_float32.graphs, tmp_path, RTX_89)
    (in_float32.graphs / bindings.SELECT_GRAPH).unlink()
    with pytest.raises(EngineBuildError, match=r"prefix_select\.onnx does not exist; run"):
        compile_graphs(in_float32.graphs, tmp_path, RTX_89)


def test_a_build_that_cannot_fit_is_refused_before_it_starts(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "memory_bytes", lambda: 1 << 10)
    with pytest.raises(EngineBuildError, match=r"compiling \w+\.onnx .* 0\.8 GiB of host memory .* smaller target"):
        compile_graphs(pair.graphs, tmp_path, RTX_89)


def test_kernels_need_triton(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "dspark_trt_plugins.compile", raising=False)
    with pytest.raises(EnvironmentMissingError, match=r"package triton, .*pip install .*triton=="):
        compile_graphs(pair.graphs, tmp_path, RTX_89)
