"""The graphs that are rewritten for TensorRT-RTX compute what they computed before, on ONNX Runtime in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from dspark_trt import bindings
from dspark_trt.dims import target_dims_from_metadata
from dspark_trt.engines.protocol import EngineLimits
from dspark_trt.engines.tensorrt_queries import hold_queries, query_buffer, rows_input
from tests.factories import write_drafter, write_target
from tests.rtx_graphs import Pair, export

LIMITS = EngineLimits(max_slots=4, max_seq_len=448, max_batch_tokens=64)
CAPACITY = LIMITS.max_seq_len + LIMITS.max_batch_tokens
NUM_LAYERS = 2
KV_HEADS, HEAD_DIM = 2, 16
GAMMA = 5
Arrays = dict[str, NDArray[np.generic]]


@pytest.fixture(scope="module")
def float_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """In float32, which ONNX Runtime computes."""
    folder = tmp_path_factory.mktemp("float")
    target = write_target(folder / "target", layers=NUM_LAYERS, hidden=64, head_dim=HEAD_DIM, kv_heads=KV_HEADS)
    drafter = write_drafter(folder / "drafter", target, layers=NUM_LAYERS, gamma=GAMMA, taps=(0, 1))
    return export(target, drafter, folder / "graphs", LIMITS, "fp32")


@pytest.mark.parametrize("query_length", [1, 3, GAMMA + 1])
def test_the_rewritten_target_computes_the_same(float_pair: Pair, query_length: int) -> None:
    """Whatever the query buffers held before, as long as it is finite."""
    path = float_pair.graphs / bindings.TARGET_GRAPH
    inputs = target_call(path, query_length)
    expected = run(onnx.load(path, load_external_data=False), path, inputs)
    model, held = hold_queries(onnx.load(path, load_external_data=False), {bindings.DECODE: GAMMA + 1}, "float32")
    assert len(held) == NUM_LAYERS
    found = run(model, path, inputs | buffers(held, inputs))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_the_rewritten_draft_computes_the_same(float_pair: Pair) -> None:
    path = float_pair.graphs / bindings.DRAFT_GRAPH
    model = onnx.load(path, load_external_data=False)
    inputs = draft_call(model)
    expected = run(model, path, inputs)
    rewritten, held = hold_queries(model, {bindings.CONTEXT: GAMMA}, "float32")
    found = run(rewritten, path, inputs | buffers(held, inputs))
    np.testing.assert_array_equal(found[bindings.DRAFT_IDS], expected[bindings.DRAFT_IDS])
    np.testing.assert_allclose(found[bindings.DRAFT_LOGITS], expected[bindings.DRAFT_LOGITS], rtol=1e-5, atol=1e-5)


def run(model: onnx.ModelProto, path: Path, inputs: Arrays) -> Arrays:
    """Outputs by name; weights stand beside the graph."""
    rewritten = path.with_name("rewritten.onnx")
    rewritten.write_bytes(model.SerializeToString())
    session = onnxruntime.InferenceSession(rewritten, providers=["CPUExecutionProvider"])
    names = [
        output.name
        for output in session.get_outputs()
        if rows_input(output.name.removesuffix(bindings.cache_output(""))) is None
    ]
    return dict(zip(names, session.run(names, inputs), strict=True))


def buffers(held: tuple[bindings.Binding, ...], inputs: Arrays) -> Arrays:
    random = np.random.default_rng(9)
    assert [binding.name for binding in held] == [
        query_buffer(held[0].name.split(".")[0], i) for i in range(NUM_LAYERS)
    ]
    return {
        binding.name: random.normal(size=(len(inputs[rows_input(binding.name) or ""]), *binding.shape[1:])).astype(
            np.float32
        )
        for binding in held
    }


def random_caches(model: onnx.ModelProto, rows: int) -> Arrays:
    random = np.random.default_rng(3)
    shape = (rows, KV_HEADS, CAPACITY, HEAD_DIM)
    names = [info.name for info in model.graph.input if "_cache." in info.name]
    return {
        name: random.normal(size=(1 if name.startswith("prefill") else rows, *shape[1:])).astype(np.float32)
        for name in names
    }


def target_call(path: Path, query_length: int) -> Arrays:
    """Three rows that verify, one of them with fewer tokens and one without any; the prefill group idles."""
    model = onnx.load(path, load_external_data=False)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    random = np.random.default_rng(query_length)
    past, lengths = np.array([100, 0, 40]), np.array([query_length, 0, max(query_length - 1, 1)])
    rows = np.repeat(np.arange(3), lengths)
    within = np.concatenate([np.arange(length) for length in lengths])
    tokens = np.zeros((3, query_length), np.int64)
    tokens[rows, within] = np.arange(len(rows))
    idle = np.zeros(1, np.int64)
    return {
        bindings.TOKEN_IDS: random.integers(0, target_dims_from_metadata(metadata, str(path)).vocab_size, len(rows)),
        bindings.POSITIONS: past[rows] + within,
        bindings.LOGIT_ROWS: np.arange(len(rows)),
        bindings.OUTPUT_SLOTS: rows * query_length + within,
        bindings.group_tokens(bindings.DECODE): tokens,
        bindings.group_past_lengths(bindings.DECODE): past,
        bindings.group_query_lengths(bindings.DECODE): lengths,
        bindings.group_tokens(bindings.PREFILL): idle[:, None],
        bindings.group_past_lengths(bindings.PREFILL): idle,
        bindings.group_query_lengths(bindings.PREFILL): idle,
        **random_caches(model, 3),
    }


def draft_call(model: onnx.ModelProto) -> Arrays:
    random = np.random.default_rng(5)
    return {
        bindings.ANCHOR_IDS: np.array([7, 9]),
        bindings.PAST_LENGTHS: np.array([30, 300]),
        bindings.TEMPERATURES: np.array([0, 1], np.float32),
        bindings.UNIFORMS: random.random((2, GAMMA), np.float32),
        bindings.BLOCK_ROWS: np.array([2, 0]),
        bindings.ROW_REQUESTS: np.array([1, 0, 0]),
        bindings.ROW_QUERY_LENGTHS: np.array([1, 0, 1]),
        **random_caches(model, 3),
    }
