"""When drafting is worth its time, for whom, and how much looking again may cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark_trt.contract.calibration import blocks_around
from dspark_trt.runtime.corrections import TimeCorrection
from dspark_trt.runtime.draft_choice import Decoding, DraftChoice
from dspark_trt.runtime.draft_policy import EXPLORATION_SHARE, FIRST_LOOK_SHARE, DraftPolicy
from dspark_trt.runtime.prices import StepPrices
from dspark_trt.runtime.survival_history import SurvivalHistory
from dspark_trt.steptable.table import StepTable

GAMMA = 7
GOOD, BAD = 0.8 ** np.arange(1, GAMMA + 1), np.full(GAMMA, 0.01)
COUNTS = (1, 8, 32)


def table(*, draft_share: float = 0.1, token_share: float = 0.05) -> StepTable:
    """Plain steps of 20, 40 and 100 ms; a token of draft costs `token_share` of one, a slot `draft_share` / 2."""
    plain = np.array([20.0, 40.0, 100.0])
    per_token = plain * token_share / np.array(COUNTS)
    extra = np.arange(0, 33 * GAMMA)
    return StepTable(
        num_requests=COUNTS,
        extra_tokens=tuple(extra.tolist()),
        step_ms=(tuple(tuple((ms + each * extra).tolist()) for ms, each in zip(plain, per_token, strict=True)),),
        num_slots=(1, GAMMA),
        draft_ms=(tuple((ms * draft_share * 0.5, ms * draft_share * GAMMA * 0.5) for ms in plain.tolist()),),
    )


class Batch:
    """R requests that decode on and on, each with survivals of its own."""

    def __init__(self, survivals: list[np.ndarray], steps: StepTable, *, prior: np.ndarray = GOOD) -> None:
        self.survivals = np.array(survivals)
        num_rows = len(survivals)
        self.history = SurvivalHistory(num_rows=num_rows, gamma=GAMMA, prior=blocks_around(prior))
        self.prices = StepPrices(steps, TimeCorrection())
        self.policy = DraftPolicy(self.prices, self.history, num_rows=num_rows, slot_counts=(1, 2, 3, 4, 7))
        self.rows = np.arange(num_rows)

    def step(self, caps: int = GAMMA, looked_up: np.ndarray | None = None) -> DraftChoice:
        choice = self.policy.choose(
            Decoding(
                rows=self.rows,
                generations=self.rows,
                caps=np.full(len(self.rows), caps),
                num_pending=np.full(len(self.rows), 1),
                context_tokens=0.0,
            ),
            looked_up,
        )
        drafting = self.rows[choice.is_drafting]
        self.history.record(drafting, drafting, self.survivals[drafting])
        return choice

    def run(self, num_steps: int) -> list[DraftChoice]:
        return [self.step() for _ in range(num_steps)]


def test_good_cheap_drafts_are_made_and_bad_ones_are_not() -> None:
    assert Batch([GOOD], table()).run(20)[-1].num_slots >= 3
    bad = Batch([BAD], table())
    bad.run(60)
    assert sum(choice.num_slots > 0 for choice in bad.run(200)) < 20


def test_a_drafter_that_turns_out_bad_is_left_alone_within_a_few_steps() -> None:
    choices = Batch([BAD], table()).run(50)
    assert [choice.num_slots for choice in choices[30:50]].count(0) >= 19


def test_a_stair_that_is_worth_climbing_is_climbed_as_planned_and_a_slope_needs_no_plan() -> None:
    """The second draft costs 8 ms and the next six nothing: stopping early never comes to them."""
    on_slope = table()
    extra = np.arange(33 * GAMMA)
    stair = np.where(extra < 2, 0.0, 8.0 + np.maximum(extra - 8, 0) * 4.0)
    steps_ms = tuple(tuple((ms + stair).tolist()) for ms in (20.0, 40.0, 100.0))
    on_stair = replace(on_slope, step_ms=(steps_ms,))
    planned = Batch([GOOD] * 8, on_stair).run(20)[-1]
    assert planned.num_planned == 8
    assert planned.is_drafting.any()
    assert Batch([GOOD] * 8, on_slope).run(20)[-1].num_planned == 0


def test_fewer_slots_are_drafted_where_survival_falls_faster() -> None:
    fast = Batch([0.5 * 0.2 ** np.arange(GAMMA)], table(draft_share=0.2)).run(20)[-1]
    slow = Batch([0.9 ** np.arange(1, GAMMA + 1)], table(draft_share=0.2)).run(20)[-1]
    assert 0 < fast.num_slots < slow.num_slots


def test_the_same_drafter_drafts_at_light_load_and_not_at_heavy() -> None:
    """A token beside one request costs 5 % of a step, beside 32 almost as much as a token of its own."""
    survivals = 0.6 * 0.4 ** np.arange(GAMMA)
    light = Batch([survivals], table(token_share=0.05))
    heavy = Batch([survivals] * 32, table(token_share=0.9))
    assert light.run(20)[-1].num_slots > 0
    assert heavy.run(20)[-1].is_drafting.sum() <= 1


def test_a_request_whose_drafts_fail_skips_alone() -> None:
    batch = Batch([GOOD] * 4 + [BAD] * 4, table(draft_share=0.3))
    drafting = np.mean([choice.is_drafting for choice in batch.run(160)[120:]], axis=0)
    assert drafting[:4].min() > 0.9
    assert drafting[4:].max() < 0.2


def test_looking_again_costs_its_share_and_no_more() -> None:
    batch = Batch([BAD], table(draft_share=0.5), prior=BAD)
    choices = batch.run(2000)
    explored = [choice for choice in choices if choice.is_explored.any()]
    assert explored, "skipping is probed again"
    cost = float(
        batch.prices.draft(1, 2, 0, 1) + batch.prices.plain(1, 0, 0, 2)[-1] - batch.prices.plain(1, 0, 0, 0)[0]
    )
    lost = len(explored) * (cost - 0.02 * 20.0)  # two drafts of one percent each bring next to nothing
    assert lost <= 1.01 * (EXPLORATION_SHARE * 2000 + FIRST_LOOK_SHARE) * 20.0


def test_drafting_resumes_when_drafts_become_good() -> None:
    batch = Batch([BAD], table(), prior=BAD)
    batch.run(200)
    batch.survivals[:] = GOOD
    assert batch.run(600)[-1].num_slots >= 3


def test_a_request_takes_its_lookup_where_that_promises_more_than_a_block() -> None:
    batch = Batch([GOOD] * 3, table())
    batch.run(20)
    looked_up = np.zeros((3, GAMMA))
    looked_up[0] = 0.95 ** np.arange(1, GAMMA + 1)
    looked_up[1] = 0.1 ** np.arange(1, GAMMA + 1)
    for _ in range(8):
        choice = batch.step(looked_up=looked_up)
        assert choice.is_looking_up.tolist() == [True, False, False]
        assert choice.is_drafting.tolist() == [False, True, True]


def test_a_lookup_is_taken_where_the_drafter_does_not_pay() -> None:
    batch = Batch([BAD], table(draft_share=5.0), prior=BAD)
    looked_up = 0.3 ** np.arange(1, GAMMA + 1)[None, :]
    assert batch.step(looked_up=looked_up).is_looking_up.all()


def test_copies_that_bring_less_than_their_time_outside_the_engines_are_left_alone() -> None:
    looked_up = 0.3 ** np.arange(1, GAMMA + 1)[None, :]
    steps = replace(table(draft_share=5.0), host_ms=(0.0,) * len(COUNTS), drafting_host_ms=(12.0,) * len(COUNTS))
    batch = Batch([BAD], steps, prior=BAD)
    assert not batch.step(looked_up=looked_up).is_looking_up.any()
    assert batch.step(looked_up=np.ones((1, GAMMA))).is_looking_up.all()


def test_the_drafter_has_to_beat_the_lookups_and_not_only_a_plain_step() -> None:
    """Two requests with sure lookups fill the step so well that a dear block for the third is not worth waiting for."""
    steps = table(draft_share=1.0)
    alone = Batch([0.9 ** np.arange(1, GAMMA + 1)] * 8, steps, prior=GOOD)
    looked_up = np.ones((8, GAMMA))
    looked_up[0] = 0.0
    assert not [alone.step(looked_up=looked_up).is_drafting[0] for _ in range(3)][-1]


def test_no_request_and_no_room_draft_nothing() -> None:
    batch = Batch([GOOD], table())
    assert batch.step(caps=0).num_slots == 0


@pytest.mark.parametrize("steps_ago", [0, 1])
def test_survivals_younger_than_two_steps_change_no_choice(steps_ago: int) -> None:
    batches = [Batch([GOOD] * 3, table()) for _ in range(2)]
    for batch in batches:
        batch.run(10)
    batches[1].survivals[:] = BAD
    first = [batch.step() for batch in batches]  # hands in what differs
    assert (first[0].is_drafting == first[1].is_drafting).all()
    for _ in range(steps_ago):
        later = [batch.step() for batch in batches]
        assert (later[0].is_drafting == later[1].is_drafting).all()
        assert later[0].num_slots == later[1].num_slots


def test_one_decision_takes_no_row_count_that_the_table_lacks() -> None:
    single = StepTable(num_requests=(1,), extra_tokens=(0, 1), step_ms=(((10.0, 11.0),),), draft_ms=(((1.0,),),))
    batch = Batch([GOOD] * 5, single)
    assert batch.run(10)[-1].is_drafting.shape == (5,)


def test_blocks_of_a_row_that_another_request_moved_to_are_forgotten() -> None:
    history = SurvivalHistory(num_rows=2, gamma=GAMMA, prior=blocks_around(GOOD))
    history.record(np.array([0]), np.array([5]), BAD[None])
    history.move(1, 0)  # its occupant has drafted nothing
    before = history.expected(np.array([0]), np.array([6]))
    history.record_nothing()
    history.record_nothing()
    np.testing.assert_array_equal(history.expected(np.array([0]), np.array([6])), before)


def test_a_context_that_has_waited_long_does_not_keep_a_request_from_drafting() -> None:
    """Bringing it up costs more than one step gains, and serves many."""
    steps = replace(table(draft_share=0.2), ingest_tokens=(1, 256), ingest_ms=(0.1, 25.6))
    batch = Batch([GOOD] * 8, steps)
    decoding = Decoding(
        rows=batch.rows,
        generations=batch.rows,
        caps=np.full(8, GAMMA),
        num_pending=np.full(8, 100),
        context_tokens=100.0,
    )
    assert batch.policy.choose(decoding).is_drafting.all()
