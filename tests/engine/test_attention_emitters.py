"""All forms of attention give the same numbers, at any capacity, and are made of the operators that they promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import Attention, drafter_dims, target_dims
from dspark_trt.contract.draft_bindings import draft_inputs, draft_outputs
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import ExportError
from dspark_trt.graphs.target import write_target_graph
from tests.engine.test_onnxruntime_drafter import Contexts, assert_same_drafts
from tests.support.conversations import Conversations, open_pair, open_target, read_pair
from tests.support.factories import write_drafter, write_target
from tests.support.graph_files import all_nodes
from tests.support.onnxruntime_device_session import write_device_graphs

LIMITS = EngineLimits(max_requests=4, max_seq_len=448, max_batch_tokens=64)
LONG_LIMITS = EngineLimits(max_requests=4, max_seq_len=8128, max_batch_tokens=64)
TAPS = (0, 2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    folder = tmp_path_factory.mktemp("checkpoints")
    target = write_target(folder / "target", family="qwen3", max_positions=16384)
    return read_pair(target, write_drafter(folder / "drafter", target, taps=TAPS))


def test_gqa_and_standard_agree(checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint], tmp_path: Path) -> None:
    target = checkpoints[0]
    gqa = open_target(target, tmp_path / "gqa", taps=TAPS, limits=LIMITS)
    standard = open_target(target, tmp_path / "standard", taps=TAPS, limits=LIMITS, attention="standard")
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    for _ in range(5):
        step = rows.random_step(max_query=12)
        output, expected = gqa.forward(step.batch), standard.forward(step.batch)
        np.testing.assert_allclose(output.logits, expected.logits, atol=1e-4, rtol=0)
        np.testing.assert_allclose(output.taps, expected.taps, atol=1e-4, rtol=0)
        rows.commit(step, rows.random_acceptance(step))


def test_folded_heads_and_standard_agree_in_long_contexts(tmp_path: Path) -> None:
    """Rows of unlike lengths, up to the last position; 17 tokens of four heads a KV head are too many to fold."""
    target = read_target(write_target(tmp_path / "target", kv_heads=1, max_positions=1024))
    gqa = open_target(target, tmp_path / "gqa", taps=TAPS, limits=LIMITS)
    standard = open_target(target, tmp_path / "standard", taps=TAPS, limits=LIMITS, attention="standard")
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    steps = [([0, 2], [60, 4], 0), *[([0], [64], 0)] * 4, ([3], [9], 0)]
    steps += [([2, 0, 3], [3, 6, 1], 3), ([0, 2], [1, 1], 2), ([0, 3], [2, 5], 2), ([0, 1, 3], [3, 7, 2], 2)]
    steps += [([0, 2], [17, 2], 2), ([3, 0], [1, 8], 2), *[([0], [32], 0)] * 3, ([0, 2], [5, 6], 2), ([0], [4], 1)]
    for at, lengths, num_decode in steps:
        step = rows.step(at, lengths, num_decode=num_decode)
        output, expected = gqa.forward(step.batch), standard.forward(step.batch)
        np.testing.assert_allclose(output.logits, expected.logits, atol=1e-4, rtol=0)
        np.testing.assert_allclose(output.taps, expected.taps, atol=1e-4, rtol=0)
        rows.commit(
            step, [max(length - 2, 1) if index < num_decode else length for index, length in enumerate(lengths)]
        )
    model = onnx.load(tmp_path / "gqa" / bindings.TARGET_GRAPH, load_external_data=False)
    branches = [node for node in model.graph.node if node.op_type == "If"]
    assert len(branches) == 1 + target.spec.decoder.num_layers, "one bias, and one choice a layer"


def test_drafter_and_standard_agree(checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint], tmp_path: Path) -> None:
    _, drafter = open_pair(*checkpoints, tmp_path / "drafter", limits=LIMITS)
    _, standard = open_pair(*checkpoints, tmp_path / "standard", limits=LIMITS, is_standard=True)
    contexts = Contexts(drafter, standard, tap_width=len(TAPS) * 32)
    for rows, lengths in (([2, 0], [9, 3]), ([3, 2], [1, 4]), ([0, 2, 3, 1], [2, 2, 5, 8])):
        contexts.ingest(rows, lengths)
        assert_same_drafts(*contexts.draft(rows))


def test_capacity_changes_no_number(checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint], tmp_path: Path) -> None:
    """Rows of 512 and of 8192 positions: what is not live is not looked at."""
    short_target, short_drafter = open_pair(*checkpoints, tmp_path / "short", limits=LIMITS)
    long_target, long_drafter = open_pair(*checkpoints, tmp_path / "long", limits=LONG_LIMITS)
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    contexts = Contexts(short_drafter, long_drafter, tap_width=len(TAPS) * 32)
    for _ in range(4):
        step = rows.random_step(max_query=12)
        np.testing.assert_array_equal(short_target.forward(step.batch).logits, long_target.forward(step.batch).logits)
        rows.commit(step, rows.random_acceptance(step))
        contexts.ingest(step.batch.rows.tolist(), step.batch.query_lengths.tolist())
        short, long = contexts.draft(step.batch.rows.tolist())
        np.testing.assert_array_equal(short.draft_logits, long.draft_logits)


@pytest.mark.parametrize(
    ("form", "seam"),
    [
        ("gqa", {("com.microsoft", "GroupQueryAttention")}),
        ("standard", {("", "Softmax"), ("", "TensorScatter")}),
        ("paged", {("dspark", "PageWrite"), ("dspark", "RowAttention")}),
    ],
)
def test_only_attention_differs_and_everything_else_is_standard(
    checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint],
    tmp_path: Path,
    form: Attention,
    seam: set[tuple[str, str]],
) -> None:
    target, drafter = checkpoints
    if form == "paged":
        write_device_graphs(target, drafter, tmp_path, limits=LIMITS)
    else:
        open_pair(target, drafter, tmp_path, limits=LIMITS, is_standard=form == "standard")
    of_target = target_dims(target.spec, num_taps=len(TAPS), limits=LIMITS, attention=form)
    of_drafter = drafter_dims(drafter.spec, limits=LIMITS, attention="drafter" if form == "gqa" else form)
    tables = {
        bindings.TARGET_GRAPH: (bindings.target_inputs(of_target), bindings.target_outputs(of_target)),
        bindings.INGEST_GRAPH: (bindings.ingest_inputs(of_drafter), bindings.ingest_outputs(of_drafter)),
        bindings.DRAFT_GRAPH: (draft_inputs(of_drafter), draft_outputs(of_drafter)),
    }
    found = set()
    for name, (inputs, outputs) in tables.items():
        model = onnx.load(tmp_path / name, load_external_data=False)
        weights = {tensor.name for tensor in model.graph.initializer}
        assert {value.name for value in model.graph.input} - weights == {binding.name for binding in inputs}
        assert {value.name for value in model.graph.output} == {binding.name for binding in outputs}
        onnx.checker.check_graph(_without_external_data(model).graph, _context(model))
        operators = {(node.domain, node.op_type) for node in model.graph.node}
        called = sorted(op for op in operators if op[0] == "dspark")
        assert sorted((function.domain, function.name) for function in model.functions) == called, "each body once"
        found |= operators
        names = [node.name for node in model.graph.node]
        assert len(set(names)) == len(names)
        for node in all_nodes(model):
            if node.op_type == "Attention":  # what TensorRT's parser would drop or read differently
                assert len(node.input) == 4
                assert {attribute.name for attribute in node.attribute} == {"scale"}
    assert seam <= found
    assert ("", "Attention") not in found, "in RowAttention's body alone; heads of 8 are products of matrices"
    assert {op for op in found if op[0]} - seam == {("dspark", "MarkovHead")}


def test_a_target_has_no_drafter_attention(
    checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint], tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="expected 'gqa', 'standard' or 'paged'"):
        write_target_graph(
            checkpoints[0], tmp_path, taps=(), limits=LIMITS, gamma=5, precision="fp32", attention="drafter"
        )


def _context(model: onnx.ModelProto) -> onnx.checker.C.CheckerContext:
    context = onnx.checker.C.CheckerContext()
    context.ir_version = model.ir_version
    context.opset_imports = {opset.domain: opset.version for opset in model.opset_import}
    return context


def _without_external_data(model: onnx.ModelProto) -> onnx.ModelProto:
    """External weights become inputs: the checker would look for files, and refuses hard links."""
    for tensor in list(model.graph.initializer):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            if tensor.name not in {value.name for value in model.graph.input}:
                model.graph.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                )
            model.graph.initializer.remove(tensor)
    return model
