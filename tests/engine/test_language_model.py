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
from dspark_trt.contract.protocol import IngestBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.errors import CapacityError
from tests.engine.test_drafter_forms_in_loops import requests
from tests.engine.test_onnxruntime_drafter import LIMITS, Contexts, assert_same_drafts
from tests.engine.test_target_families import CASES as FAMILIES
from tests.support.conversations import open_pair
from tests.support.device_cases import LIMITS as SMALL_LIMITS
from tests.support.device_cases import Pair as SmallPair
from tests.support.device_cases import check_distribution
from tests.support.factories import write_target
from tests.support.gemma4 import write_gemma_target
from tests.support.model_oracle import TransformersDrafter
from tests.support.toy_engines import make_loop, run
from tests.support.transformers_targets import write_by_transformers

PARD = {"config_extra": {"pard_token": 90, "spd_type": "pard"}}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SMALL: dict[str, Any] = {"hidden": 24, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 16, "seed": 7}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "biases": True},
    "qwen3, tied": {"family": "qwen3", "tied": True, "rope": YARN},
    "fewer ids": {"family": "qwen3", "vocab_size": 80, "tied": True},
    "more ids": {"family": "llama", "vocab_size": 128},
    "head_dim 10, which falls back": {"heads": 6, "kv_heads": 3, "head_dim": 10},
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


@pytest.mark.parametrize("family", ["qwen2 with windows above a layer", "qwen3 moe", "gemma4"])
def test_a_model_of_another_family_drafts_as_transformers_has_it(family: str, tmp_path: Path) -> None:
    target = read_target(str(write_target(tmp_path / "target", family="qwen3")))
    if family == "gemma4":
        folder = write_gemma_target(tmp_path / "drafter", vocab_size=97)
    else:
        folder = write_by_transformers(tmp_path / "drafter", **FAMILIES[family])
    drafter = read_drafter(str(folder), target, num_drafts=3)
    engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)[1]
    contexts = Contexts(engine, oracle(tmp_path, drafter), tap_width=0, seed=6)
    for lengths in ([9, 14, 1], [3, 1, 2]):
        contexts.ingest([4, 0, 2], lengths)
        assert_same_drafts(*contexts.draft([0, 4]))


def test_what_is_handed_over_with_a_draft_is_ingested_by_its_first_pass(tmp_path: Path) -> None:
    """With rows that do not draft among them, and at every number of slots."""
    for case in ("fewer ids", "PARD"):
        folder = tmp_path / case
        target, drafter = write_pair(folder, case)
        engine = open_pair(target, drafter, folder / "graphs", limits=LIMITS)[1]
        other = oracle(folder, drafter)
        contexts = Contexts(engine, other, tap_width=0, seed=5)
        for num_slots in range(1, 5):
            contexts.ingest([2], [1])
            ingested: list[IngestBatch] = []
            contexts.engines = (SimpleNamespace(ingest=ingested.append, gamma=4, limits=LIMITS),)  # type: ignore[assignment]
            contexts.ingest([3, 0, 4], [2, 7, 1])
            block = contexts.block([2, 0, 3])
            block = replace(block, uniforms=block.uniforms[:, :num_slots], wants_logits=num_slots > 1)
            contexts.engines = (engine, other)
            output, expected = (each.draft(block, ingested[0]) for each in contexts.engines)
            np.testing.assert_array_equal(output.draft_ids, expected.draft_ids)
            if num_slots > 1:
                assert_same_drafts(output, expected)
        assert_same_drafts(*contexts.draft([4]))


def test_a_moved_row_drafts_as_before_and_limits_hold(tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path, "llama")
    engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)[1]
    contexts = Contexts(engine, tap_width=0)
    contexts.ingest([0, 4], [6, 9])
    block = contexts.block([4])
    before = engine.draft(block).draft_ids.copy()
    engine.move_row(4, 1, 9)
    np.testing.assert_array_equal(engine.draft(replace(block, rows=np.array([1]))).draft_ids, before)
    contexts.ingest([0], [60])
    contexts.ingest([0], [29])
    assert engine.draft(contexts.block([0])).draft_ids.shape == (1, 4)  # behind the last position but one
    with pytest.raises(CapacityError, match="97 positions, max_seq_len is 96"):
        contexts.ingest([0], [2])


def test_a_chosen_vocabulary_and_eight_bits(tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path, "fewer ids")
    kept = np.arange(5, 75, 3)
    forms = DrafterForm(draft_vocab=kept), DrafterForm("int8", kept)
    engines = [open_pair(target, drafter, tmp_path / form.precision, limits=LIMITS, form=form)[1] for form in forms]
    np.testing.assert_array_equal(engines[0].draft_vocab, kept)
    contexts = Contexts(*engines, oracle(tmp_path, drafter, kept), tap_width=0)
    contexts.ingest([1, 2], [5, 3])
    exact, quantised, expected = contexts.draft([2, 1])
    assert_same_drafts(exact, expected)
    difference = np.abs(exact.draft_logits[:, 0] - quantised.draft_logits[:, 0]).mean()  # type: ignore[index]
    assert 0 < difference < 0.1 * np.abs(exact.draft_logits).mean()  # type: ignore[arg-type]


@pytest.mark.parametrize(("case", "mode"), [("llama", "fixed"), ("llama", "lagged_budget"), ("PARD", "early_stop")])
def test_sampled_texts_have_the_targets_distribution(case: str, mode: str, tmp_path: Path) -> None:
    """Chi-square over all texts of three tokens of five ids, of which the drafter has four."""
    target = read_target(str(write_target(tmp_path / "target", family="qwen3", vocab_size=5)))
    more = {"config_extra": {"pard_token": 3}} if case == "PARD" else {}
    folder = write_target(tmp_path / "drafter", **SMALL, vocab_size=4, eos_token_ids=(2,), **more)
    pair = SmallPair(target, read_drafter(str(folder), target, num_drafts=4))
    engines: Any = open_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=SMALL_LIMITS)
    engines = SimpleNamespace(target=engines[0], drafter=engines[1], step=None, acceptance=None, pages=None)
    check_distribution(engines, pair, SchedulerConfig(mode), num_samples=500)  # type: ignore[arg-type]


def test_a_target_that_drafts_for_itself_accepts_every_draft(tmp_path: Path) -> None:
    """Through chunked prompts, moved rows and prompts that begin alike: a wrong position of the context would show."""
    folder = write_target(tmp_path / "target", family="qwen3")
    target = read_target(str(folder))
    engines: Any = open_pair(
        target, read_drafter(str(folder), target, num_drafts=3), tmp_path / "graphs", limits=LIMITS
    )
    loop = make_loop(*engines, SchedulerConfig("fixed"))
    alike = [replace(each, request_id=f"{each.request_id}, again") for each in requests()]
    run(loop, [*requests(), *alike])
    assert loop.totals.num_drafts_verified == loop.totals.num_drafts_accepted > 100
    assert loop.totals.num_rows_moved > 0
