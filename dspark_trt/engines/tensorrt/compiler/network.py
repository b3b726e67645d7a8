"""One ONNX graph as a TensorRT network, read strictly:
what the parser would do otherwise than the graph says is an error.

TensorRT's parser drops what it does not know with a warning at most, an attention input that it has no use for, for
example, and the engine then computes something else. So a warning that says so ends the build, and what is dropped is
looked for besides. Other warnings are logged and kept with the engine's facts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
from dspark_trt_plugins.operation import NAMESPACE

from dspark_trt.contract import bindings
from dspark_trt.engines.tensorrt.library import BuildLog
from dspark_trt.errors import EngineBuildError

_PLUGIN_LAYER = "PLUGIN_V3"
_CACHE_LAYER = "KV_CACHE_UPDATE"
_PAGE_WRITE = "PageWrite"
# Said where something else is computed than the graph says (TensorRT 11, TensorRT-RTX 1.7, the parser's source).
# A compiler also speaks of tactics that it ignores or that are not supported, which is no departure.
_DEPARTURES_OF_A_COMPILER = re.compile(r"unused input|clamp", re.IGNORECASE)
_DEPARTURES_OF_A_PARSER = re.compile(
    r"unused input"
    r"|ignor(?:ed|es|ing)"
    r"|clamp"
    r"|out(?:side)? (?:of )?(?:the )?range"
    r"|truncat"
    r"|(?:not|n't|un)[ -]?support"
    r"|overrid"
    r"|losing precision|loss of precision|lossy",
    re.IGNORECASE,
)


def parse_graph(
    trt: Any, builder: Any, model: onnx.ModelProto, path: Path, log: BuildLog
) -> tuple[Any, tuple[str, ...]]:
    """The network of a graph, and what the parser warned of, which changes nothing that is computed.

    Weights are read from the files beside `path`, which is where the graph stands. Raises EngineBuildError, naming the
    graph and quoting the parser, on any error and on a warning that something else is computed.
    """
    flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # gone where networks are always so
    network = builder.create_network(0 if flags is None else 1 << int(flags))
    parser = trt.OnnxParser(network, log.logger)
    log.take()
    is_parsed = parser.parse(model.SerializeToString(), str(path))
    errors = [_described(parser.get_error(index)) for index in range(parser.num_errors)]
    if not is_parsed or errors:
        raise EngineBuildError(
            f"{path.name}: {trt.__name__} {trt.__version__} cannot parse the graph: "
            f"{'; '.join(errors or log.take()) or 'it gives no reason'}; report this, with the version of "
            f"{trt.__name__}"
        )
    warnings = log.take()
    check_warnings(trt, path.name, warnings, _DEPARTURES_OF_A_PARSER)
    return network, warnings


def check_warnings(
    trt: Any, graph: str, warnings: Iterable[str], departures_known: re.Pattern[str] = _DEPARTURES_OF_A_COMPILER
) -> None:
    """Raises EngineBuildError where a warning, by default of the compiler, says that something else is computed than
    the graph says."""
    if departures := [warning for warning in warnings if departures_known.search(warning)]:
        raise EngineBuildError(
            f"{graph}: {trt.__name__} {trt.__version__} would not compute what the graph says: "
            f"{'; '.join(departures)}; report this, with the version of {trt.__name__}"
        )


def count_layers(network: Any) -> dict[str, int]:
    """Number of layers by type, of the network as parsed."""
    types = (str(network.get_layer(index).type).rpartition(".")[2] for index in range(network.num_layers))
    return dict(sorted(Counter(types).items()))


def check_layers(network: Any, model: onnx.ModelProto, graph: str, *, use_plugins: bool) -> None:
    """Whether the network computes what the graph says, and caches are written in place.

    Raises EngineBuildError when an input is read by no layer, Attention is asked for what TensorRT does not do, a node
    of the plugins became something else, or a cache is not written by what does it in place.
    """
    _check_inputs(network, model, graph)
    nodes = [node for node in model.graph.node if node.domain == NAMESPACE]
    num_plugins = count_layers(network).get(_PLUGIN_LAYER, 0)
    if num_plugins != (len(nodes) if use_plugins else 0):
        raise EngineBuildError(
            f"{graph}: expected {len(nodes) if use_plugins else 'no'} plugin layers for "
            f"{[node.name for node in nodes]}, found {num_plugins}; export the graph again"
        )
    written = {(node.input[3], node.output[0]) for node in nodes if node.op_type == _PAGE_WRITE}
    scattered = {(node.input[0], node.output[0]) for node in model.graph.node if node.op_type == "TensorScatter"}
    updated = set()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if str(layer.type).endswith(_CACHE_LAYER):
            updated.add((layer.get_input(0).name, layer.get_output(0).name))
    outputs = {info.name for info in model.graph.output}
    expected = {
        (info.name, bindings.cache_output(info.name))
        for info in model.graph.input
        if bindings.cache_output(info.name) in outputs
    }
    found = written | updated
    if updated != scattered or (use_plugins and found != expected):
        wrong = sorted(found ^ expected) or sorted(updated ^ scattered)
        raise EngineBuildError(
            f"{graph}: expected every cache to be written in place, found {len(found)} writes for {len(expected)} "
            f"caches, different for {wrong[:2]}; export the graph again"
        )


def _check_inputs(network: Any, model: onnx.ModelProto, graph: str) -> None:
    """What the parser of TensorRT 11 and TensorRT-RTX 1.7 drops of Attention: all inputs behind the mask, and the
    alignment of is_causal where queries and keys are not equally many.
    """
    for node in model.graph.node:
        if node.op_type == "Attention":
            dropped = [name for name in node.input[4:] if name]
            dropped += [attribute.name for attribute in node.attribute if attribute.name == "is_causal" and attribute.i]
            if dropped:
                raise EngineBuildError(
                    f"{graph}: {node.name}: expected Attention with a mask alone, found {dropped}, which TensorRT "
                    "would not compute as the graph says; export the graph again"
                )
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    read = {
        layer.get_input(index).name for layer in layers for index in range(layer.num_inputs) if layer.get_input(index)
    }
    inputs = [network.get_input(index).name for index in range(network.num_inputs)]
    if unread := [name for name in inputs if name not in read]:
        raise EngineBuildError(
            f"{graph}: expected every input to be used, found that no layer reads {unread}: TensorRT would not "
            "compute what the graph says; export the graph again"
        )


def _described(error: Any) -> str:
    return f"node {error.node_name()} ({error.node_operator()}): {error.desc()}"
