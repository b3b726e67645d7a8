"""DeepSpec's drafter of Gemma 4: on ONNX Runtime, in PyTorch, and by transformers' own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.contract.protocol import DraftBatch, EngineLimits, IngestBatch
from dspark_trt.reference.engines import open_reference_engines
from tests.support.conversations import open_pair, read_pair
from tests.support.gemma4 import write_gemma_drafter, write_gemma_target
from tests.support.gemma4_oracle import Gemma4DrafterOracle

LIMITS = EngineLimits(max_requests=3, max_seq_len=96, max_batch_tokens=64)
TOLERANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "12B form": {},
    "values of their own, no cap, own embedding": {
        "target": {"attention_k_eq_v": False, "final_logit_softcapping": None},
        "drafter": {"has_own_embedding": True},
    },
    "head_dim 12, which falls back": {"target": {"global_head_dim": 12}},
}


@pytest.mark.parametrize("case", CASES)
def test_drafts_logits_and_confidences_equal_the_oracles_over_steps_with_rejections(case: str, tmp_path: Path) -> None:
    target_folder = write_gemma_target(tmp_path / "target", **CASES[case].get("target", {}))
    drafter_folder = write_gemma_drafter(tmp_path / "drafter", target_folder, **CASES[case].get("drafter", {}))
    target, drafter = read_pair(target_folder, drafter_folder)
    assert drafter.spec.has_own_embedding == ("own embedding" in case)
    engines = (
        open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)[1],
        open_reference_engines(target, drafter, limits=LIMITS)[1],
    )
    oracle = Gemma4DrafterOracle(drafter_folder)
    random, largest = np.random.default_rng(0), 0.0
    contexts = [np.empty((0, drafter.spec.num_taps * 32), np.float32) for _ in range(LIMITS.max_requests)]
    for _ in range(4):
        rows = random.permutation(LIMITS.max_requests)[: random.integers(1, LIMITS.max_requests + 1)]
        lengths = random.integers(1, 9, len(rows))
        taps = random.standard_normal((lengths.sum(), contexts[0].shape[1])).astype(np.float32)
        past = np.array([len(contexts[row]) for row in rows])
        for row, new in zip(rows, np.split(taps, np.cumsum(lengths)[:-1]), strict=True):
            contexts[row] = np.concatenate([contexts[row], new])
        anchors = random.integers(0, 97, len(rows))
        zeros = np.zeros((len(rows), 5), np.float32)
        for engine in engines:
            engine.ingest(IngestBatch(taps, rows, past, lengths))
            output = engine.draft(DraftBatch(rows, anchors, past + lengths, zeros[:, 0], zeros))
            assert output.draft_logits is not None
            for index, row in enumerate(rows):
                drafts, logits, confidences = oracle.block(torch.from_numpy(contexts[row]), int(anchors[index]))
                np.testing.assert_array_equal(output.draft_ids[index], drafts)
                np.testing.assert_allclose(output.draft_logits[index], logits, atol=TOLERANCE, rtol=0)
                np.testing.assert_allclose(output.confidence_logits[index], confidences, atol=TOLERANCE, rtol=0)
            largest = max(largest, float(np.abs(output.draft_logits).max()))
    if drafter.spec.decoder.logit_softcap is not None:  # the cap is for the base logits: the bias goes beyond it
        assert largest > drafter.spec.decoder.logit_softcap
