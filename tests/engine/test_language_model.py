"""Language models that draft, PARD's among them: drafts and logits equal to transformers over steps with rejections,
and the target's own tokens and distribution through the loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.spec import DrafterCheckpoint, LanguageModelSpec, TargetCheckpoint
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.protocol import DraftEngine
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.errors import CapacityError, ExportError
from tests.engine.test_drafter_forms_in_loops import requests
from tests.engine.test_onnxruntime_drafter import LIMITS, Contexts, assert_same_drafts
from tests.support.conversations import open_pair
from tests.support.device_cases import LIMITS as SMALL_LIMITS
from tests.support.device_cases import Pair as SmallPair
from tests.support.device_cases import check_distribution
from tests.support.factories import write_target
from tests.support.model_oracle import TransformersDrafter
from tests.support.toy_engines import make_loop, run

PARD = {"config_extra": {"pard_token": 90, "spd_type": "pard"}}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SMALL: dict[str, Any] = {"hidden": 24, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 16, "seed": 7}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "biases": True},
    "qwen3, tied": {"family": "qwen3", "tied": True, "rope": YARN},
    "fewer ids": {"family": "qwen3", "vocab_size": 80, "tied": True},
    "more ids": {"family": "llama", "vocab_size": 128},
    "PARD": {"family": "llama", **PARD},
    "PARD, tied, more ids": {"family": "qwen3", "tied": True, "vocab_size": 104, **PARD},
}


def write_pair(tmp_path: Path, case: str, num_drafts: int = 4) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    target = read_target(str(write_target(tmp_path / "target", family="qwen3")))
    folder = write_target(tmp_path / "drafter", **{**SMALL, **CASES[case]})
    drafter = read_drafter(str(folder), target, num_drafts=num_drafts)
    check_pairing(target, drafter)
    return target, drafter


def oracle(tmp_path: Path, drafter: DrafterCheckpoint, ids: np.ndarray | None = None) -> TransformersDrafter:
    assert isinstance(drafter.spec, LanguageModelSpec)
    return TransformersDrafter(tmp_path / "drafter", drafter.spec, LIMITS, drafter.draft_ids if ids is None else ids)


class Late(Contexts):
    """Contexts whose last ingestion is handed over with the draft."""

    def late(self, rows: list[int], query_lengths: list[int]) -> None:
        engines, self.engines = self.engines, (self,)  # type: ignore[assignment]
        super().ingest(rows, query_lengths)
        self.engines = engines

    def __init__(self, *engines: DraftEngine) -> None:
        super().__init__(*engines, tap_width=0, seed=4)
        self.waiting: Any = None


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_transformers_and_greedy_tokens_are_the_targets(case: str, tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path, case)
    engines = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    contexts = Contexts(engines[1], oracle(tmp_path, drafter), tap_width=0, seed=4)
    for _ in range(4):
        rows = contexts.random.permutation(LIMITS.max_requests)[: contexts.random.integers(1, LIMITS.max_requests + 1)]
        # what a call for drafts has written behind the context is overwritten here
        contexts.ingest(rows.tolist(), contexts.random.integers(1, 9, len(rows)).tolist())
        assert_same_drafts(*contexts.draft(rows.tolist()))
    plain: Any = run(make_loop(engines[0], None, SchedulerConfig("off")), requests())  # type: ignore[arg-type]
    outputs = run(make_loop(*engines, SchedulerConfig("fixed")), requests())  # type: ignore[arg-type]
    assert {key: each.token_ids for key, each in outputs.items()} == {
        key: each.token_ids for key, each in plain.items()
    }
