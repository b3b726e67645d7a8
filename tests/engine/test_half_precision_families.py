"""16-bit graphs of EAGLE-3, language models, PARD and Medusa: their float32 twins against the oracles, and themselves
in the evaluator of the onnx package (see test_half_precision_twins)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dspark_trt.contract.precision import Precision
from dspark_trt.engines.onnxruntime import drafter as onnxruntime_drafter
from dspark_trt.engines.onnxruntime import language_model as onnxruntime_language_model
from dspark_trt.engines.onnxruntime.engines import open_draft_engine
from tests.engine.test_device_families import FAMILIES
from tests.engine.test_half_precision_float16 import rms
from tests.engine.test_half_precision_twins import PRECISIONS, write_graphs
from tests.engine.test_onnxruntime_drafter import LIMITS, Contexts, assert_same_drafts
from tests.support.conversations import SETTINGS
from tests.support.graph_files import EvaluatorSession, write_twin


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_twin_drafts_what_the_oracle_drafts_and_the_graph_that_up_to_rounding(
    family: str, precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, cases = FAMILIES[family]
    target, drafter, oracle = opened(tmp_path, cases[0])
    half = write_graphs((target, drafter), tmp_path / "half", precision, limits=LIMITS)
    whole = write_graphs((target, drafter), tmp_path / "whole", "fp32", limits=LIMITS)
    twin = open_draft_engine(write_twin(half, whole, tmp_path / "twin"), SETTINGS)
    for module in (onnxruntime_drafter, onnxruntime_language_model):
        monkeypatch.setattr(module, "GraphSession", EvaluatorSession)
    rounded = open_draft_engine(half, SETTINGS)
    contexts = Contexts(twin, oracle, rounded, tap_width=drafter.spec.num_taps * 32, seed=7)
    for rows, lengths in (([2, 0], [7, 3]), ([0, 1], [2, 4])):
        contexts.ingest(rows, lengths)
        exact, expected, found = contexts.draft(rows)
        assert_same_drafts(exact, expected)
        logits = np.asarray(exact.draft_logits)[:, 0]  # later slots follow drafts, which rounding may change
        # weights are rounded too
        assert 0 < rms(np.asarray(found.draft_logits)[:, 0] - logits) < 16 * PRECISIONS[precision][2] * logits.std()
