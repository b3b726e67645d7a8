"""Lookahead in one chain: what is kept of rejected drafts, and that it never changes an output."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_trt.contract.lookup import UNMEASURED_LOOKUP
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.runtime.lookup import Lookup
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.runtime.trajectories import GUESS_MATCH_LEN, MAX_POOLED_RUNS, TrajectoryIndex
from tests.support.toy_engines import FLAT, LIMITS, STEEP, ToyLanguage, ToyTarget, make_loop, run

LANGUAGE = ToyLanguage(vocab_size=12, order=1, num_patterns=61, scale=4.0, seed=5)


def after_step(
    tokens: list[int], drafts: list[int], num_accepted: int, bonus: int, predicted: list[int]
) -> TrajectoryIndex:
    """An index of `tokens` behind a step that verified `drafts`."""
    index = TrajectoryIndex(tokens)
    for token_id in [*drafts[:num_accepted], bonus]:
        index.append(token_id)
    index.harvest(drafts, num_accepted, predicted)
    return index


def test_a_text_is_copied_as_without_trajectories() -> None:
    assert TrajectoryIndex([1, 2, 3, 4]).look_up(3) is None
    found = TrajectoryIndex([1, 2, 7, 1, 2, 8, 9, 1, 2]).look_up(2)
    assert found is not None
    assert found.draft_ids == (8, 9)
    assert TrajectoryIndex([1, 2, 3] * 4).look_up(7) == Lookup((1, 2, 3, 1, 2, 3, 1), 8, (8,) * 7)


def test_a_prediction_behind_a_rejected_draft_is_drafted_where_that_draft_comes_again() -> None:
    """7 was drafted in vain behind 1; the target said that 8 follows it. When 7 is written, 8 is the draft."""
    index = after_step([1], [7, 9], 0, 2, [8, 6])
    assert index.look_up(1) == Lookup((8,), GUESS_MATCH_LEN, (GUESS_MATCH_LEN,))  # a guess for its position
    index.append(7)
    assert index.look_up(3) == Lookup((8,), 1, (1,)), "nothing is known behind 8"
    index.append(9)
    assert index.look_up(1) == Lookup((6,), 2, (2,)), "7 9 was the run"


def test_a_prediction_is_a_guess_for_its_own_position_in_the_next_step_alone() -> None:
    """Jacobi iteration: of 1 | 3 4 5 with 3 accepted, 4 became 9; what was said behind 4 and 5 are the next guesses."""
    index = after_step([1], [3, 4, 5], 1, 9, [6, 7])
    found = index.look_up(5)
    assert found is not None
    assert found.draft_ids == (6, 7)
    index.append(6)
    assert index.look_up(5) is None


def test_a_run_of_the_pool_begins_in_the_text() -> None:
    index = after_step([4, 5], [6], 0, 0, [2])  # 4 5 | 6 -> 2
    for token_id in (5, 6):
        index.append(token_id)
    assert index.look_up(1) == Lookup((2,), 2, (2,)), "5 6, of which only 6 was a draft"


def test_the_pool_forgets_its_oldest_runs() -> None:
    index = TrajectoryIndex([0])
    index.append(0)
    index.harvest([1, 2], 0, [3, 4])
    for number in range(MAX_POOLED_RUNS):
        index.append(0)
        index.harvest([10 + number], 0, [5])
    index.append(1)
    assert index.look_up(1) is None
    index.append(10 + MAX_POOLED_RUNS - 1)
    assert index.look_up(1) is not None


def pooled_naively(history: list[tuple[list[int], int]], tokens: list[int], num_drafts: int) -> list[int]:
    """The rule of the pool once more, from all that was ever verified: what stood before, and what was predicted."""
    drafts: list[int] = []
    while len(drafts) < num_drafts:
        text = [*tokens, *drafts]
        for length in (8, 4, 2, 1):
            run_now = text[-length:]
            pooled = [
                said
                for before, said in history
                if length <= 2 and len(before) >= length == len(run_now) and before[-length:] == run_now
            ]
            copied = [tokens[at] for at in range(length, len(tokens)) if tokens[at - length : at] == run_now]
            if found := pooled[-1:] or copied[-1:]:
                drafts.append(found[0])
                break
        else:
            return drafts
    return drafts


def test_drafts_are_those_of_the_rule_over_the_whole_history() -> None:
    random = np.random.default_rng(0)
    tokens, history = [0], []
    index = TrajectoryIndex(tokens)
    for _ in range(120):
        drafts, predicted = random.integers(0, 6, 3).tolist(), random.integers(0, 6, 3).tolist()
        chain = [*tokens, *drafts]
        bonus = int(random.integers(0, 6))
        index.append(bonus)
        index.harvest(drafts, 0, predicted)
        history += [(chain[: len(tokens) + 1 + at], said) for at, said in enumerate(predicted)]
        tokens.append(bonus)
        expected = pooled_naively(history, tokens, 6)
        found = index.look_up(6)
        assert (list(found.draft_ids) if found else [])[: len(expected)] == expected


def greedy(number: int) -> GenerationRequest:
    prompt = tuple((3 * number + at) % 12 for at in range(1 + number % 3))
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    return GenerationRequest(request_id=str(number), prompt_ids=prompt, sampling=sampling)


@pytest.mark.parametrize("mode", ["fixed", "fixed:2", "threshold:0.5", "early_stop", "lagged_budget", "auto"])
@pytest.mark.parametrize("table", [FLAT, STEEP], ids=["flat", "steep"])
def test_greedy_output_is_that_of_plain_decoding(mode: str, table: object) -> None:
    plain = make_loop(ToyTarget(LANGUAGE, LIMITS), None, parse_scheduler("off"))
    loop = make_loop(
        ToyTarget(LANGUAGE, LIMITS),
        None,
        parse_scheduler(mode),
        table=table,  # type: ignore[arg-type]
        lookup=UNMEASURED_LOOKUP,
        keeps_trajectories=True,
    )
    requests = [greedy(number) for number in range(12)]
    expected, found = run(plain, requests), run(loop, requests)
    assert {key: output.token_ids for key, output in found.items()} == {
        key: output.token_ids for key, output in expected.items()
    }
    if table is FLAT:
        assert loop.totals.num_drafts_accepted > 50


def test_trajectories_accept_more_than_copies_alone() -> None:
    """In a language of one token's memory what the target says behind a token holds wherever the token stands."""
    language = ToyLanguage(vocab_size=40, order=1, num_patterns=301, scale=4.0, seed=8)
    accepted, verified = [], []
    for keeps_trajectories in (False, True):
        loop = make_loop(
            ToyTarget(language, LIMITS),
            None,
            parse_scheduler("fixed"),
            lookup=UNMEASURED_LOOKUP,
            keeps_trajectories=keeps_trajectories,
        )
        sampling = [SamplingParams(max_tokens=60, temperature=0.7, seed=seed) for seed in range(40)]
        run(
            loop,
            [
                GenerationRequest(request_id=str(at), prompt_ids=(at,), sampling=each)
                for at, each in enumerate(sampling)
            ],
        )
        accepted.append(loop.totals.num_drafts_accepted)
        verified.append(loop.totals.num_steps)
    assert accepted[1] > accepted[0]
    assert verified[1] < verified[0]
