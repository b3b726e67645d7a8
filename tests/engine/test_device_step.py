"""The fused step on a device against its parts:
the oracle's draft, the scheduler's choice on the host, the oracle's verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.contract import bindings
from dspark_trt.engines.device.warm_up import likely_requests, warm_up
from dspark_trt.errors import CapacityError, EngineBuildError
from tests.support.fused_steps import LIMITS, FusedSteps


@pytest.mark.parametrize("case", [{}, {"head_type": "rnn", "gamma": 7}, {"confidence": False}, {"gamma": 1}], ids=str)
def test_a_fused_step_equals_draft_selection_and_verification(case: dict[str, Any], tmp_path: Path) -> None:
    steps = FusedSteps(tmp_path, seed=len(str(case)), **case)
    gamma, random = steps.gamma, steps.random
    for index in range(16):
        order = random.permutation(LIMITS.max_requests).tolist()
        count = int(random.integers(1, 5))
        rows, free = order[:count], order[count:]
        steps.begin(rows)
        num_drafting = int(random.integers(1, count + 1))
        caps = [int(random.integers(1, gamma + 1)) if at < num_drafting else 0 for at in range(count)]
        forced = tuple(at for at in range(num_drafting) if random.random() < 0.2)
        chunks = [(row, int(random.integers(1, 12))) for row in free[: index % 3]]
        steps.check(steps.inputs(rows, caps, int(random.integers(0, sum(caps) + 3)), forced=forced, chunks=chunks))
    assert steps.pair.target.bound_extents
    assert steps.pair.select.num_runs, "beside prompt chunks the selection is not bound"


@pytest.fixture
def steps(tmp_path: Path) -> FusedSteps:
    steps = FusedSteps(tmp_path)
    steps.begin([0, 1, 2, 3])
    return steps


def test_everything_that_is_offered_is_verified_where_the_budget_exceeds_it(steps: FusedSteps) -> None:
    assert steps.check(steps.inputs([0, 1, 2], [5, 2, 1], 1000)).tolist() == [5, 2, 1]


def test_nothing_is_verified_where_the_budget_is_0(steps: FusedSteps) -> None:
    assert steps.check(steps.inputs([0, 1, 2], [5, 2, 1], 0)).tolist() == [0, 0, 0]


def test_forced_drafts_are_not_counted_in_the_budget(steps: FusedSteps) -> None:
    chosen = steps.check(steps.inputs([2, 0, 1], [4, 3, 5], 2, forced=(0, 1)))
    assert chosen[:2].tolist() == [4, 3]
    assert chosen[2] == 2


def test_requests_that_do_not_draft_stand_behind_and_decode_their_anchor(steps: FusedSteps) -> None:
    chosen = steps.check(steps.inputs([3, 1, 0, 2], [5, 4, 0, 0], 6))
    assert chosen.sum() == 6
    assert chosen[2:].tolist() == [0, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_budget_is_spent_whatever_the_confidences_are(steps: FusedSteps, value: float) -> None:
    """T was fixed before: drafts of survival 0 fill it in their order."""

    def overwrite(tensors: Any) -> None:
        tensors[bindings.CONFIDENCE_LOGITS][0, 1:] = value
        tensors[bindings.CONFIDENCE_LOGITS][2] = value

    steps.pair.select.before_call = overwrite
    inputs = steps.inputs([0, 1, 2], [5, 5, 5], 11)
    _, found = steps.run(inputs)
    assert found.confidence_logits is not None
    assert not np.isfinite(found.confidence_logits[2]).any()
    assert found.verify_lens.sum() == 11
    np.testing.assert_array_equal(found.verify_lens, steps.choose(inputs.select, found.confidence_logits))


def test_steps_of_any_number_of_requests_share_few_selections(steps: FusedSteps) -> None:
    """The selection is padded to a bucket of requests: each number of its own would be bound anew while serving."""
    steps.begin([4, 5])
    for count in range(1, 7):
        for num_admitted in (0, 3):
            steps.check(steps.inputs(list(range(count)), [5] * count, num_admitted))
    assert {extents["R"] for extents in steps.pair.select.bound_extents} == {1, 2, 4, 6}
    assert len(steps.pair.select.bound_extents) <= 8


def test_likely_steps_are_bound_beforehand_and_change_no_answer(steps: FusedSteps, tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    warm = FusedSteps(tmp_path / "warm")
    sessions = (warm.pair.target, warm.pair.draft, warm.pair.select, warm.pair.ingest)
    assert warm_up(warm.engines) > 20
    bound = [len(session.bound_extents) for session in sessions]
    assert min(bound) >= 4
    assert list(likely_requests(LIMITS)) == [6, 4, 2, 1]
    warm.begin([0, 1, 2, 3])
    for count in (1, 2, 4):
        rows = list(range(count))
        warm.check(warm.inputs(rows, [warm.gamma] * count, count * warm.gamma))
        query = np.full(count, warm.gamma + 1)
        warm.ingest(rows, query, warm.lengths[rows])
    assert [len(session.bound_extents) for session in sessions] == bound


def test_a_step_beside_prompt_chunks_in_distant_rows_is_one_call(steps: FusedSteps) -> None:
    before = steps.pair.target.num_runs
    steps.check(steps.inputs([1, 2], [5, 5], 7, chunks=[(5, 20), (0, 19), (4, 3)]))
    assert steps.pair.target.num_runs == before + 1


def test_the_host_hears_of_the_drafts_before_the_verification_has_run(steps: FusedSteps) -> None:
    """On a CPU device everything happens in order: the copies that `wait` reads stand in front of the verification."""
    heard: list[np.ndarray] = []
    fetched = steps.engines.drafter.fetched
    steps.pair.target.before_call = lambda tensors: heard.append(fetched._piece.array.copy())
    _, found = steps.run(steps.inputs([0, 1], [3, 3], 4))
    ids = fetched._layout.arrays(heard[-1])[bindings.DRAFT_IDS]
    np.testing.assert_array_equal(ids[:2], found.draft_ids)


def test_drafts_have_to_be_read_before_the_next_step(steps: FusedSteps) -> None:
    inputs = steps.inputs([0, 1], [3, 3], 4)
    late = steps.engines.step.draft_and_verify(inputs.draft, inputs.select, inputs.plain)
    steps.engines.step.draft_and_verify(inputs.draft, inputs.select, inputs.plain)
    with pytest.raises(AssertionError, match="fetched again"):
        late.wait()


def test_a_step_in_the_same_buckets_binds_nothing_again(steps: FusedSteps) -> None:
    sessions = (steps.pair.target, steps.pair.draft, steps.pair.select)
    steps.check(steps.inputs([0, 1, 2], [5, 5, 5], 5))
    bound = [len(session.bound_extents) for session in sessions]
    steps.check(steps.inputs([2, 0, 1], [5, 5, 5], 4))
    assert [len(session.bound_extents) for session in sessions] == bound
    steps.check(steps.inputs([2, 0], [5, 5], 6))
    assert [len(session.bound_extents) for session in sessions] == [each + 1 for each in bound]


def test_a_plain_step_and_a_fused_one_share_the_target_s_bucket(steps: FusedSteps) -> None:
    inputs = steps.inputs([0, 1, 2], [5, 5, 5], 5)
    steps.check(inputs)
    bound = len(steps.pair.target.bound_extents)
    drafts = np.zeros((3, 5), np.int64)
    plain = steps.with_drafts(inputs.plain, drafts, np.array([2, 0, 3]))
    steps.engines.target.forward(plain)
    assert len(steps.pair.target.bound_extents) == bound


def test_steps_beyond_the_limits_are_refused_before_anything_is_written(steps: FusedSteps) -> None:
    caches = [engine.cache.layers[0] for engine in (steps.engines.target, steps.engines.drafter)]
    before = [cache.clone() for cache in caches]
    too_many = steps.inputs([0, 1], [5, 5], 10, chunks=[(4, 61)])
    steps.lengths[1] = LIMITS.max_seq_len - 4
    too_long = steps.inputs([0, 1], [5, 5], 1)
    for inputs, message in (
        (too_many, "73 packed tokens exceeds max_batch_tokens 72"),
        (too_long, "98 positions, max_seq_len is 96"),
    ):
        with pytest.raises(CapacityError, match=message):
            steps.engines.step.draft_and_verify(inputs.draft, inputs.select, inputs.plain)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old)


@pytest.mark.parametrize("graph", ["draft", "select", "target"])
def test_a_failing_backend_is_an_error_of_the_project(steps: FusedSteps, graph: str) -> None:
    inputs = steps.inputs([0, 1], [3, 3], 4)
    getattr(steps.pair, graph).is_failing = True
    with pytest.raises(EngineBuildError):
        steps.run(inputs)
    getattr(steps.pair, graph).is_failing = False
    steps.check(inputs)
