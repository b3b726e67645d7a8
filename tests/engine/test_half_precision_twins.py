"""16-bit graphs by their float32 twins in ONNX Runtime, and themselves in the evaluator of the onnx package.

A twin is the 16-bit graph with float32 in the place of every 16-bit type, so what is shown of its numbers holds for the
16-bit graph but for rounding. ONNX Runtime has no bfloat16 on a CPU and widens much of float16; the evaluator rounds
behind every operator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from dspark_trt_plugins.markov_head.form import EXCLUDED_LOGIT
from onnx import TensorProto

from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract import bindings
from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.onnxruntime import drafter as onnxruntime_drafter
from dspark_trt.engines.onnxruntime import engines as onnxruntime_engines
from dspark_trt.errors import EngineBuildError
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.graphs.target import write_target_graph
from dspark_trt.reference.engines import open_reference_engines
from tests.engine import test_onnxruntime_drafter as drafters
from tests.engine import test_onnxruntime_target as targets
from tests.engine.test_half_precision_float16 import rms
from tests.support.conversations import (
    GAMMA,
    SETTINGS,
    Conversations,
    TransformersTarget,
    expected_outputs,
    open_pair,
    read_pair,
)
from tests.support.factories import write_drafter, write_target
from tests.support.graph_files import EvaluatorSession, all_nodes, initial_values, write_twin

GRAPHS = (bindings.TARGET_GRAPH, bindings.INGEST_GRAPH, bindings.DRAFT_GRAPH)
HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"head_type": "gated"},
    "rnn": {"head_type": "rnn"},
    "no head": {"markov_rank": 0},
    "no confidence": {"confidence": False},
}
PRECISIONS: dict[Precision, tuple[int, Any, float]] = {  # type in ONNX and in numpy, unit roundoff
    "bf16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16, 2.0**-8),
    "fp16": (TensorProto.FLOAT16, np.float16, 2.0**-11),
}


def pair(folder: Path, dtype: str, **head: Any) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    target = write_target(folder / "target", family="qwen3", dtype=dtype)
    return read_pair(target, write_drafter(folder / "drafter", target, taps=drafters.TAPS, dtype=dtype, **head))


def write_graphs(
    checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint],
    folder: Path,
    precision: Precision,
    *,
    limits: EngineLimits = drafters.LIMITS,
    markov_top_n: int = 0,
) -> Path:
    target, drafter = checkpoints
    folder.mkdir()
    write_target_graph(
        target,
        folder,
        taps=drafter.spec.target_layer_ids,
        norm_last_tap=drafter.spec.is_last_tap_normed,
        limits=limits,
        gamma=drafter.spec.gamma,
        precision=precision,
        attention="standard",
    )
    write_drafter_graphs(
        target,
        drafter,
        folder,
        limits=limits,
        precision=precision,
        attention="standard",
        form=DrafterForm(markov_top_n=markov_top_n),
    )
    return folder


def write_twins(
    checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint], folder: Path, precision: Precision, **options: Any
) -> Path:
    half = write_graphs(checkpoints, folder, precision, **options)
    return write_twin(half, write_graphs(checkpoints, folder / "whole", "fp32", **options), folder / "twin")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("markov_top_n", [0, 7])
@pytest.mark.parametrize("head", HEADS)
def test_a_16_bit_graph_has_one_16_bit_type_and_the_checkpoints_weights_rounded_once(
    head: str, markov_top_n: int, precision: Precision, tmp_path: Path
) -> None:
    checkpoints = pair(tmp_path, "float32", **HEADS[head])
    half = write_graphs(checkpoints, tmp_path / "half", precision, markov_top_n=markov_top_n)
    whole = write_graphs(checkpoints, tmp_path / "whole", "fp32", markov_top_n=markov_top_n)
    onnx_type, dtype, _ = PRECISIONS[precision]
    for name in GRAPHS:
        types = _float_types(onnx.load(half / name, load_external_data=False))
        assert onnx_type in types
        assert types <= {onnx_type, TensorProto.FLOAT}
        rounded, exact = initial_values(half / name), initial_values(whole / name)
        assert rounded.keys() == exact.keys()
        for key, value in rounded.items():
            np.testing.assert_array_equal(value, exact[key].astype(value.dtype), strict=True)
        assert {value.dtype for value in rounded.values()} >= {np.dtype(dtype)}


def _float_types(model: onnx.ModelProto) -> set[int]:
    values = (*model.graph.input, *model.graph.output)
    types = {value.type.tensor_type.elem_type for value in values}
    types |= {tensor.data_type for tensor in model.graph.initializer}
    for node in all_nodes(model):
        types |= {attribute.i for attribute in node.attribute if node.op_type == "Cast"}
    return types - {TensorProto.INT64, TensorProto.BOOL, TensorProto.DOUBLE}


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_what_onnx_runtime_serves_has_no_casts_between_floats(precision: Precision, tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, "bfloat16", head_type="rnn")
    open_pair(target, drafter, tmp_path / "graphs", limits=drafters.LIMITS, precision=precision)
    for name in GRAPHS:
        model = onnx.load(tmp_path / "graphs" / name, load_external_data=False)
        assert _float_types(model) <= {TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT8, TensorProto.INT8}
        casts = [node for node in model.graph.node if node.op_type == "Cast"]
        assert {node.attribute[0].i for node in casts} <= {TensorProto.INT32}
        # inside of MarkovHead float64 sums and nothing else
        bodies = [node for node in all_nodes(model) if node.op_type == "Cast" and node not in casts]
        assert {node.attribute[0].i for node in bodies} <= {TensorProto.DOUBLE, TensorProto.INT64}


@pytest.mark.parametrize("case", ["llama biases", "llama llama3", "qwen3", "qwen3 tied, biases", "qwen3 yarn"])
def test_the_twin_equals_transformers_on_bfloat16_weights(case: str, tmp_path: Path) -> None:
    taps = (-1, 0, 2, 3)
    folder = write_target(tmp_path / "target", dtype="bfloat16", **targets.CASES[case])
    checkpoint = read_target(str(folder))
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    for precision in precisions:
        (tmp_path / precision).mkdir()
        write_target_graph(
            checkpoint,
            tmp_path / precision,
            taps=taps,
            limits=targets.LIMITS,
            gamma=GAMMA,
            precision=precision,
            attention="standard",
        )
    twin = write_twin(tmp_path / "bf16", tmp_path / "fp32", tmp_path / "twin")
    engine = onnxruntime_engines.OnnxRuntimeTargetEngine(twin, SETTINGS)
    model = TransformersTarget(folder)
    rows = Conversations(num_rows=targets.LIMITS.max_requests, vocab_size=97, seed=sum(case.encode()))
    for _ in range(4):
        step = rows.random_step(max_query=9)
        output, (logits, tap_values) = engine.forward(step.batch), expected_outputs(model, step, taps)
        np.testing.assert_allclose(output.logits, logits, atol=targets.TOLERANCE, rtol=0)
        np.testing.assert_allclose(output.taps, tap_values, atol=targets.TOLERANCE, rtol=0)
        rows.commit(step, rows.random_acceptance(step))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("head", HEADS)
def test_the_twin_drafts_what_the_reference_drafts(head: str, precision: Precision, tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, "bfloat16", **HEADS[head])
    limits = drafters.LIMITS
    twin = write_twins((target, drafter), tmp_path / "graphs", precision)
    _, engine = onnxruntime_engines.open_engines(twin, SETTINGS)
    _, reference = open_reference_engines(target, drafter, limits=limits)
    contexts = drafters.Contexts(engine, reference, tap_width=len(drafters.TAPS) * 32, seed=sum(head.encode()))
    for _ in range(3):
        rows = contexts.random.permutation(limits.max_requests)[: contexts.random.integers(1, limits.max_requests + 1)]
        contexts.ingest(rows.tolist(), contexts.random.integers(1, 9, len(rows)).tolist())
        drafters.assert_same_drafts(*contexts.draft(rows.tolist()))


@pytest.mark.parametrize("head", ["vanilla", "rnn", "no head"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_twin_of_a_restricted_head_drafts_from_the_largest_base_logits(
    precision: Precision, head: str, tmp_path: Path
) -> None:
    """Logits of those that are left are those of the unrestricted head where the previous token is the same: in slot
    0."""
    checkpoints, top_n, engines = pair(tmp_path, "bfloat16", **HEADS[head]), 7, []
    for restriction in (top_n, 0):
        twin = write_twins(checkpoints, tmp_path / f"top {restriction}", precision, markov_top_n=restriction)
        engines.append(onnxruntime_engines.open_engines(twin, SETTINGS)[1])
    contexts = drafters.Contexts(*engines, tap_width=len(drafters.TAPS) * 32)
    contexts.ingest([0, 1], [4, 6])
    block = contexts.block([0, 1])
    restricted, free = (engine.draft(block).draft_logits for engine in engines)
    is_left = restricted > EXCLUDED_LOGIT
    assert (is_left.sum(axis=2) == top_n).all()
    np.testing.assert_allclose(restricted[:, 0][is_left[:, 0]], free[:, 0][is_left[:, 0]], atol=1e-4, rtol=0)


def test_onnx_runtime_refuses_bfloat16(tmp_path: Path) -> None:
    """If it takes it one day, twins are no longer needed."""
    folder = write_graphs(pair(tmp_path, "bfloat16"), tmp_path / "graphs", "bf16")
    with pytest.raises(EngineBuildError, match="NOT_IMPLEMENTED"):
        onnxruntime_engines.OnnxRuntimeTargetEngine(folder, SETTINGS)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("head", HEADS)
def test_the_16_bit_graphs_compute_what_their_twins_do_up_to_rounding(
    head: str, precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, then a step with a prompt chunk beside them, then drafts: every graph, caches written in place."""
    _, dtype, roundoff = PRECISIONS[precision]
    limits = EngineLimits(max_requests=3, max_seq_len=40, max_batch_tokens=16)
    checkpoints = pair(tmp_path, "bfloat16", layers=2, **HEADS[head])
    half = write_graphs(checkpoints, tmp_path / "half", precision, limits=limits)
    whole = write_graphs(checkpoints, tmp_path / "whole", "fp32", limits=limits)
    twin = write_twin(half, whole, tmp_path / "twin")
    twin_target, twin_drafter = onnxruntime_engines.open_engines(twin, SETTINGS)
    for module in (onnxruntime_engines, onnxruntime_drafter):
        monkeypatch.setattr(module, "GraphSession", EvaluatorSession)
    half_target, half_drafter = onnxruntime_engines.open_engines(half, SETTINGS)
    rows = Conversations(num_rows=limits.max_requests, vocab_size=97)
    contexts = drafters.Contexts(half_drafter, twin_drafter, tap_width=len(drafters.TAPS) * 32)
    for members, lengths, num_decode in (([2, 0], [5, 3], 0), ([0, 1, 2], [2, 4, 3], 1)):
        step = rows.step(members, lengths, num_decode)
        output, expected = half_target.forward(step.batch), twin_target.forward(step.batch)
        assert output.taps.dtype == dtype
        assert 0 < rms(output.logits - expected.logits) < 8 * roundoff * expected.logits.std()
        assert 0 < rms(output.taps - expected.taps) < 8 * roundoff * expected.taps.std()
        rows.commit(step, lengths)
        contexts.ingest(members, lengths)
    block = contexts.block([2, 0])
    drafts, expected_drafts = half_drafter.draft(block), twin_drafter.draft(block)
    logits = expected_drafts.draft_logits[:, 0]  # later slots follow drafts, which rounding may change
    assert 0 < rms(drafts.draft_logits[:, 0] - logits) < 8 * roundoff * logits.std()
    if expected_drafts.confidence_logits is not None:
        found, wanted = drafts.confidence_logits[:, 0], expected_drafts.confidence_logits[:, 0]
        num_rounded = 2 if head == "no confidence" else 1  # a margin is the difference of two logits
        np.testing.assert_allclose(found, wanted, atol=16 * num_rounded * roundoff, rtol=0)
