"""The loop with a StepEngine: draft, selection and verification in one call give what three calls give.

The chi-square tests: had the draws been random, one would fail falsely with probability 1e-4, any of the 5 here with
0.05 percent. Seeds are fixed, so a result never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.steptable.table import StepTable
from tests.support.lossless import assert_lossless
from tests.support.step_engine_workloads import LAGGED, Parts, plain, play, request, trace_of
from tests.support.toy_engines import (
    FLAT,
    MODERATE,
    STAIRS,
    STEEP,
    ToyDrafter,
    ToyTarget,
    capricious_confidence,
    honest_confidence,
)
from tests.support.toy_step_engine import ToyStepEngine

SAMPLED = {"temperature": 1.0, "max_tokens": 4}


def broken_confidence(context: Sequence[int], seen: Sequence[int], acceptance: Sequence[float]) -> list[float]:
    """Some are not finite."""
    values = honest_confidence(context, seen, acceptance)
    for at, token in enumerate(seen):
        if token % 5 == 0:
            values[at] = (np.nan, np.inf, -np.inf)[token // 5 % 3]
    return values


CONFIDENCES = {
    "honest": honest_confidence,
    "capricious": capricious_confidence,
    "not finite": broken_confidence,
    "no head": None,
}


@pytest.mark.parametrize("confidence", CONFIDENCES.values(), ids=CONFIDENCES)
@pytest.mark.parametrize("table", [FLAT, MODERATE, STAIRS, STEEP], ids=["flat", "moderate", "stairs", "steep"])
@pytest.mark.parametrize("seed", range(3))
def test_one_call_gives_what_three_give(seed: int, table: StepTable, confidence: Any) -> None:
    unfused, fused = (Parts(fused=fused, table=table, confidence=confidence) for fused in (False, True))
    for parts in (unfused, fused):
        play(parts, seed)
    assert trace_of(fused) == trace_of(unfused)
    assert fused.loop.totals.num_rows_moved > 0
    assert fused.loop.totals.num_drafts_verified > 0
    assert "draft_and_verify" not in unfused.step_engine.num_calls
    assert fused.step_engine.num_calls["draft_and_verify"] == unfused.drafter.num_calls["draft"]


def test_the_workloads_meet_every_case() -> None:
    """Duplicates, requests that do not draft beside others that do, prompt chunks beside drafts,
    and budgets in between."""
    parts = Parts(table=STAIRS)
    for seed in range(3):
        play(parts, seed)
    selects = parts.step_engine.selects
    assert sum(bool(select.is_forced.any()) for select in selects) > 20
    assert sum(not select.caps.all() for select in selects) > 20
    offered = [int(select.caps[~select.is_forced].sum()) for select in selects]
    assert sum(0 < select.num_admitted < most for select, most in zip(selects, offered, strict=True)) > 20
    assert sum(bool(decode and prefill and drafts) for decode, prefill, _, drafts, *_ in parts.counts) > 20
    reasons = {output.last.finish_reason for output in parts.outputs.values()}
    assert reasons == {"stop", "length", "cancelled"}


class Traced:
    """An engine that writes down its calls, in `events` of the class."""

    events: ClassVar[list[str]] = []

    def _called(self, name: str) -> None:
        self.events.append(name)
        super()._called(name)  # type: ignore[misc]


class TracedTarget(Traced, ToyTarget):
    pass


class TracedDrafter(Traced, ToyDrafter):
    pass


class TracedStepEngine(Traced, ToyStepEngine):
    def draft_and_verify(self, *arguments: Any) -> Any:
        output = super().draft_and_verify(*arguments)
        self.events.append("returned")
        return output


def test_nothing_is_waited_for_between_draft_and_verification() -> None:
    """Draft logits, target logits and taps hold NaN until `wait`: what is read too early changes the text."""
    Traced.events.clear()
    parts = Parts(engines=(TracedTarget, TracedDrafter, TracedStepEngine))
    parts.submit(request("a", max_tokens=20, ignore_eos=True))
    parts.step()
    assert Traced.events == ["forward"], "a prompt alone drafts nothing"
    for _ in range(4):
        Traced.events.clear()
        parts.step()
        assert Traced.events == ["ingest", "draft_and_verify", "draft", "forward", "returned", "wait"]
    assert parts.finish()["a"].token_ids == plain((1, 2, 3), 20)


@pytest.mark.parametrize(
    "config",
    [
        SchedulerConfig("off"),
        SchedulerConfig("fixed"),
        SchedulerConfig("threshold", threshold=0.4),
        SchedulerConfig("early_stop"),
    ],
    ids=lambda config: config.mode,
)
def test_other_modes_know_too_late_how_much_is_verified(config: SchedulerConfig) -> None:
    parts = Parts(config=config)
    parts.submit(request("a", ignore_eos=True))
    assert parts.finish()["a"].token_ids == plain((1, 2, 3))
    assert parts.step_engine.num_calls == {}


def test_steps_in_which_nothing_drafts_use_the_engines_themselves() -> None:
    parts = Parts()
    parts.submit(
        GenerationRequest(
            request_id="a", prompt_ids=(1,), sampling=SamplingParams(max_tokens=8, ignore_eos=True), max_verify_len=0
        )
    )
    assert parts.finish()["a"].token_ids == plain((1,), 8)
    assert (parts.target.num_calls, parts.step_engine.num_calls) == ({"forward": 8}, {})


def test_times_of_the_call_are_split_where_the_drafts_are_known() -> None:
    parts = Parts()
    parts.submit(request("a", max_tokens=20, ignore_eos=True))
    parts.step(3)
    record = parts.loop.last_step
    assert min(record.ingest_ms, record.draft_ms, record.verify_ms, record.outside_ms) > 0
    parts.finish()
    statistics = parts.outputs["a"].last.statistics
    assert statistics is not None
    assert min(statistics.draft_ms, statistics.verify_ms) > 0


@pytest.mark.parametrize("table", [MODERATE, STAIRS], ids=["moderate", "stairs"])
def test_the_distribution_is_the_targets(table: StepTable) -> None:
    assert_lossless(LAGGED, SAMPLED, fused=True, table=table)


def test_the_distribution_is_the_targets_with_a_drafter_that_is_bad_on_purpose() -> None:
    assert_lossless(LAGGED, SAMPLED, fused=True, skill=-0.9, confidence=capricious_confidence, table=STAIRS)


def test_the_distribution_is_the_targets_with_equal_seeds_side_by_side() -> None:
    assert_lossless(LAGGED, SAMPLED, fused=True, duplicates=True, skill=0.5, confidence=capricious_confidence)


def test_the_distribution_is_the_targets_with_processors_and_eos_inside_blocks() -> None:
    params = {"temperature": 1.3, "max_tokens": 4, "min_tokens": 2, "top_p": 0.93, "repetition_penalty": 1.2}
    assert_lossless(LAGGED, params, fused=True, eos=(0,), skill=0.8, table=STAIRS)
