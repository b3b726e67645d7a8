"""The select graph: its inputs and outputs are those of `bindings`,
and ONNX Runtime computes the plugin's reference with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from dspark_trt_plugins.prefix_select.reference import prefix_select

from dspark_trt.checkpoints.spec import DrafterCheckpoint
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import drafter_dims_from_metadata
from dspark_trt.contract.forms import select_form
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.select_bindings import select_inputs, select_outputs
from dspark_trt.errors import ExportError
from dspark_trt.graphs.builder import ONNX_TYPES
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.graphs.select import write_select_graph
from dspark_trt.graphs.target import write_target_graph
from tests.support.conversations import read_pair
from tests.support.factories import write_drafter, write_target
from tests.support.prefix_select_cases import random_step

LIMITS = EngineLimits(max_requests=4, max_seq_len=64, max_batch_tokens=32)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> DrafterCheckpoint:
    folder = tmp_path_factory.mktemp("checkpoints")
    target = write_target(folder / "target")
    return read_pair(target, write_drafter(folder / "drafter", target, gamma=5))[1]


@pytest.fixture(scope="module")
def graph(drafter: DrafterCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    write_select_graph(drafter.spec, folder, limits=LIMITS, precision="bf16")
    assert set(folder.iterdir()) == {folder / bindings.SELECT_GRAPH}
    return folder / bindings.SELECT_GRAPH


def test_the_graph_has_the_bindings_of_the_device_runtime(graph: Path) -> None:
    model = onnx.load(graph)
    onnx.checker.check_model(model)
    dims = drafter_dims_from_metadata({p.key: p.value for p in model.metadata_props}, str(graph))
    assert (dims.gamma, dims.element_type, dims.limits) == (5, "bfloat16", LIMITS)
    tables = ((model.graph.input, select_inputs(dims)), (model.graph.output, select_outputs(dims)))
    for values, table in tables:
        found = [
            (v.name, v.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim])
            for v in values
        ]
        assert found == [(b.name, ONNX_TYPES[b.element_type], list(b.shape)) for b in table]
    assert [node.op_type for node in model.graph.node] == ["PrefixSelect"]


def test_its_metadata_are_those_of_the_drafters_graphs(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    target, drafter = read_pair(folder, write_drafter(tmp_path / "drafter", folder))
    graphs = tmp_path / "graphs"
    graphs.mkdir()
    write_target_graph(target, graphs, taps=(0, 2), limits=LIMITS, gamma=5, precision="fp16", attention="standard")
    write_drafter_graphs(target, drafter, graphs, limits=LIMITS, precision="fp16", attention="standard")
    write_select_graph(drafter.spec, graphs, limits=LIMITS, precision="fp16")
    draft, select = (
        onnx.load(graphs / name, load_external_data=False) for name in (bindings.DRAFT_GRAPH, bindings.SELECT_GRAPH)
    )
    assert list(draft.metadata_props) == list(select.metadata_props)


@pytest.mark.parametrize("seed", range(8))
def test_onnx_runtime_selects_what_the_reference_selects(graph: Path, drafter: DrafterCheckpoint, seed: int) -> None:
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    form = select_form(drafter_dims_from_metadata(metadata, str(graph)))
    inputs = random_step(form, 1 + 3 * seed, seed)
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(names, inputs), strict=True))
    expected = prefix_select(form, inputs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_limits_that_cannot_hold_a_block_are_refused(drafter: DrafterCheckpoint, tmp_path: Path) -> None:
    limits = EngineLimits(max_requests=1, max_seq_len=64, max_batch_tokens=5)
    with pytest.raises(ExportError, match="cannot hold an anchor and its 5 drafts"):
        write_select_graph(drafter.spec, tmp_path, limits=limits, precision="bf16")
    assert list(tmp_path.iterdir()) == []
