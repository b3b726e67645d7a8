"""No choice of a verify length looks at a draft's own future (paper Appendix A)."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.prefix_scheduler import Offer
from tests.support.schedulers import LogitScheduler

GAMMA = 4
LOGITS = st.sampled_from([-5.0, -1.0, 0.5, 5.0, 5.0, float("nan"), float("inf")])
CONFIGS = [SchedulerConfig("threshold", threshold=0.5), SchedulerConfig("early_stop"), SchedulerConfig("lagged_budget")]


@st.composite
def steps(draw: Any) -> dict[str, Any]:
    num_requests = draw(st.integers(1, 3))
    logits = [[draw(LOGITS) for _ in range(GAMMA)] for _ in range(num_requests)]
    caps = [draw(st.integers(0, GAMMA)) for _ in range(num_requests)]
    stairs = [draw(st.sampled_from([0.0, 0.0, 0.5, 12.0])) for _ in range(num_requests * GAMMA + 1)]
    return {
        "logits": np.array(logits, dtype=np.float32),
        "caps": np.array(caps),
        "is_forced": np.array([draw(st.booleans()) for _ in range(num_requests)]),
        "step_ms": 10.0 + np.cumsum(stairs),
        "num_planned": draw(st.integers(0, num_requests * GAMMA)),
        "past": [
            np.array([[draw(LOGITS) for _ in range(GAMMA)] for _ in range(num_requests)], dtype=np.float32)
            for _ in range(2)
        ],
    }


def verify_lens(config: SchedulerConfig, step: dict[str, Any], logits: np.ndarray) -> np.ndarray:
    """The choice of a step that two steps (the same ones, always) went before."""
    scheduler = LogitScheduler(config, [1.0] * GAMMA, num_rows=len(logits))
    rows = np.arange(len(logits))
    offer = Offer(
        rows=rows,
        generations=rows,
        caps=step["caps"],
        is_forced=step["is_forced"],
        num_requests=len(rows),
        step_ms=step["step_ms"],
        is_greedy=np.zeros(len(rows), bool),
    )
    for past in [*step["past"], logits]:
        chosen = scheduler.choose(past, offer, step["num_planned"])
    return chosen


@settings(max_examples=400, derandomize=True, deadline=None)
@given(step=steps(), config=st.sampled_from(CONFIGS), data=st.data())
def test_admission_of_a_draft_is_unchanged_when_later_confidences_change(
    step: dict[str, Any], config: SchedulerConfig, data: Any
) -> None:
    before = verify_lens(config, step, step["logits"])
    request = data.draw(st.integers(0, len(step["caps"]) - 1))
    slot = data.draw(st.integers(1, GAMMA))  # drafts 1 .. slot are looked at, later confidences are changed
    changed = step["logits"].copy()
    for later in range(slot, GAMMA):
        changed[request, later] = data.draw(LOGITS)
    after = verify_lens(config, step, changed)
    assert min(before[request], slot) == min(after[request], slot)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(step=steps(), config=st.sampled_from(CONFIGS))
def test_verify_lengths_stay_within_caps_and_forced_requests_reach_them(
    step: dict[str, Any], config: SchedulerConfig
) -> None:
    chosen = verify_lens(config, step, step["logits"])
    assert ((chosen >= 0) & (chosen <= step["caps"])).all()
    assert (chosen[step["is_forced"]] == step["caps"][step["is_forced"]]).all()


@settings(max_examples=200, derandomize=True, deadline=None)
@given(step=steps(), data=st.data())
def test_the_lagged_budget_does_not_depend_on_fresh_confidences(step: dict[str, Any], data: Any) -> None:
    config = SchedulerConfig("lagged_budget")
    fresh = np.array([[data.draw(LOGITS) for _ in range(GAMMA)] for _ in step["caps"]], dtype=np.float32)
    assert verify_lens(config, step, step["logits"]).sum() == verify_lens(config, step, fresh).sum()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(step=steps())
def test_a_planned_number_of_drafts_is_admitted_where_there_are_so_many(step: dict[str, Any]) -> None:
    chosen = verify_lens(SchedulerConfig("early_stop"), step, step["logits"])
    if step["num_planned"]:
        free = ~step["is_forced"]
        assert chosen[free].sum() == min(step["num_planned"], step["caps"][free].sum())
