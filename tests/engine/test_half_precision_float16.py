"""float16 graphs in ONNX Runtime against transformers and the PyTorch oracle, in float32 on the same (rounded) weights.

How far off float16 may be: float16 has a unit roundoff of 2^-11. A decoder layer rounds about twenty times,
transformers' own float16 as well, so the target is held against the error of that. For the drafter, which transformers
does not have, the bound is eight roundings of logits: 0.4 % of their standard deviation (0.15 % was measured).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt_plugins.markov_head.reference import draw
from numpy.typing import NDArray

from dspark_trt.contract.protocol import DraftBatch, DraftOutput, IngestBatch
from dspark_trt.engines.onnxruntime import engines as onnxruntime_engines
from dspark_trt.reference.engines import open_reference_engines
from tests.engine import test_onnxruntime_drafter as drafters
from tests.engine import test_onnxruntime_target as targets
from tests.support.conversations import (
    Conversations,
    TransformersTarget,
    expected_outputs,
    open_pair,
    open_target,
    read_pair,
)
from tests.support.factories import write_drafter, write_target
from tests.support.graph_files import EvaluatorSession

ROUNDOFF = 2.0**-11


def rms(difference: NDArray[Any]) -> float:
    return float(np.sqrt(np.square(difference, dtype=np.float64).mean()))


@pytest.mark.parametrize("case", targets.CASES)
def test_the_target_is_as_near_to_float32_as_transformers_own_float16(case: str, tmp_path: Path) -> None:
    taps = (-1, 0, 2, 3)
    folder = write_target(tmp_path / "target", **{"dtype": "float16", **targets.CASES[case]})
    engine = open_target(
        folder, tmp_path / "graphs", taps=taps, limits=targets.LIMITS, precision="fp16", attention="standard"
    )
    model, half_model = TransformersTarget(folder), TransformersTarget(folder, torch.float16)
    rows = Conversations(num_rows=targets.LIMITS.max_requests, vocab_size=97, seed=sum(case.encode()))
    found, bound = np.zeros(2), np.zeros(2)  # of logits and of taps
    for _ in range(6):  # caches are written in place: an error in one step shows in the next
        step = rows.random_step(max_query=9)
        output = engine.forward(step.batch)
        assert output.taps.dtype == np.float16
        expected, half = expected_outputs(model, step, taps), expected_outputs(half_model, step, taps)
        found += [rms(output.logits - expected[0]), rms(output.taps - expected[1])]
        bound += [rms(half[0] - expected[0]), rms(half[1] - expected[1])]
        rows.commit(step, rows.random_acceptance(step))
    assert (found < 1.25 * bound).all(), (found, bound)
    assert (found > 0).all()  # this was not float32


@pytest.mark.parametrize("case", drafters.CASES)
def test_drafts_are_within_float16_of_the_reference_over_steps_with_rejections(case: str, tmp_path: Path) -> None:
    options = {"dtype": "float16", **drafters.CASES[case]}
    target_folder = write_target(tmp_path / "target", family="qwen3", tied=True, dtype=options["dtype"])
    target, drafter = read_pair(
        target_folder, write_drafter(tmp_path / "drafter", target_folder, taps=drafters.TAPS, **options)
    )
    limits = drafters.LIMITS
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=limits, precision="fp16", is_standard=True)
    _, reference = open_reference_engines(target, drafter, limits=limits)
    contexts = drafters.Contexts(engine, reference, tap_width=len(drafters.TAPS) * 32, seed=sum(case.encode()))
    shares = []
    for _ in range(5):
        rows = contexts.random.permutation(limits.max_requests)[: contexts.random.integers(1, limits.max_requests + 1)]
        contexts.ingest(rows.tolist(), contexts.random.integers(1, 9, len(rows)).tolist())
        block = contexts.block(rows.tolist())
        shares.append(assert_drafts_within_float16(block, engine.draft(block), reference.draft(block)))
    assert np.mean(shares) > 0.8


def assert_drafts_within_float16(block: DraftBatch, output: DraftOutput, expected: DraftOutput) -> float:
    """Every draft is drawn from the logits handed out with it, and those are right while the drafts before them agree.

    Returns the share of equal drafts.
    """
    for slot in range(output.draft_ids.shape[1]):
        drawn = draw(output.draft_logits[:, slot], block.temperatures, block.uniforms[:, slot])
        np.testing.assert_array_equal(output.draft_ids[:, slot], drawn)
    is_same = output.draft_ids == expected.draft_ids
    before = np.pad(is_same[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    is_comparable = np.logical_and.accumulate(before, axis=1)
    logits = expected.draft_logits[is_comparable]
    assert rms(output.draft_logits[is_comparable] - logits) < 8 * ROUNDOFF * logits.std()
    found, wanted = output.confidence_logits[is_comparable], expected.confidence_logits[is_comparable]
    # the margin, without a confidence head, is a difference of two logits; rows of heads that are products of matrices
    # weigh values by float16 numbers
    np.testing.assert_allclose(found, wanted, atol=80 * ROUNDOFF, rtol=0)
    return float(is_same.mean())


def test_fc_beyond_65504_of_massive_activations_does_not_overflow_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taps that float16 holds, and an fc output that it does not:
    hidden_norm brings it back, so nothing may be infinite.

    In ONNX's evaluator, because ONNX Runtime on a CPU widens float16 products and would not overflow.
    """
    monkeypatch.setattr(onnxruntime_engines, "GraphSession", EvaluatorSession)
    target_folder = write_target(tmp_path / "target", family="qwen3", tied=True, dtype="float16")
    target, drafter = read_pair(
        target_folder, write_drafter(tmp_path / "drafter", target_folder, taps=drafters.TAPS, dtype="float16")
    )
    limits = drafters.LIMITS
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=limits, precision="fp16", is_standard=True)
    _, reference = open_reference_engines(target, drafter, limits=limits)
    random = np.random.default_rng(0)
    taps = random.uniform(-6e4, 6e4, (9, len(drafters.TAPS) * 32)).astype(np.float16)
    fc_outputs = taps.astype(np.float32) @ drafter.weights.array("fc.weight").astype(np.float32).T
    assert (np.abs(fc_outputs).max(axis=1) > 65504).any()
    batch = IngestBatch(taps, np.array([1]), np.array([0]), np.array([9]))
    block = DraftBatch(
        np.array([1]), np.array([7]), np.array([9]), np.zeros(1, np.float32), np.zeros((1, engine.gamma), np.float32)
    )
    for each in (engine, reference):
        each.ingest(batch)
    output, expected = engine.draft(block), reference.draft(block)
    assert np.isfinite(output.draft_logits).all()
    assert_drafts_within_float16(block, output, expected)
