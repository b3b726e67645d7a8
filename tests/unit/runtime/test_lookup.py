"""Drafts copied from a request's own text: what is found, how likely it is, and what it does to a request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark_trt.contract.lookup import MAX_MATCH, UNMEASURED_LOOKUP, LookupAcceptance
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.errors import RecipeError
from dspark_trt.runtime.lookup import Lookup, TokenIndex
from dspark_trt.runtime.lookup_survival import MAX_SHIFT, LookupOffer, LookupSurvival
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.runtime.scheduling import MAX_LOOKUP_REQUESTS
from tests.support.toy_engines import DEAR, FLAT, LIMITS, STEEP, ToyDrafter, ToyLanguage, ToyTarget, make_loop, run

GAMMA = 4
REPEATING = ToyLanguage(vocab_size=4, order=2, num_patterns=31, scale=3.0, seed=3)


def test_nothing_is_found_where_nothing_repeats() -> None:
    assert TokenIndex([1, 2, 3, 4]).look_up(3) is None
    assert TokenIndex([]).look_up(3) is None


def test_what_followed_the_latest_occurrence_is_copied() -> None:
    assert TokenIndex([1, 2, 7, 1, 2, 8, 9, 1, 2]).look_up(2) == Lookup((8, 9), match_len=2)


def test_a_longer_match_goes_before_a_later_one() -> None:
    text = [5, 6, 7, 8, 1, 2, 8, 3, 4, 5, 6, 7, 8]
    assert TokenIndex(text).look_up(2) == Lookup((1, 2), match_len=4)


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert TokenIndex([1, 2, 3] * 4).look_up(7) == Lookup((1, 2, 3, 1, 2, 3, 1), match_len=9)
    assert TokenIndex([5, 5]).look_up(3) == Lookup((5, 5, 5), match_len=1)


def test_a_match_counts_up_to_its_limit() -> None:
    found = TokenIndex([1, 2] * 40).look_up(1)
    assert found is not None
    assert found.match_len == MAX_MATCH


def test_tokens_that_come_later_are_found_as_if_they_had_been_there() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 3, 200).tolist()
    growing = TokenIndex([])
    for count, token_id in enumerate(tokens, start=1):
        growing.append(token_id)
        assert growing.look_up(5) == TokenIndex(tokens[:count]).look_up(5)


def offer(match_len: int, *, generation: int = 1, is_greedy: bool = True) -> LookupOffer:
    return LookupOffer.of([Lookup((1,) * GAMMA, match_len)], [0], [generation], [is_greedy])


def survival(*, corrects: bool = True) -> LookupSurvival:
    return LookupSurvival(UNMEASURED_LOOKUP, num_rows=2, gamma=GAMMA, corrects=corrects)


def test_each_accepted_draft_makes_the_match_a_token_longer() -> None:
    found = survival().confidence(offer(2))[0]
    assert found == pytest.approx(UNMEASURED_LOOKUP.greedy[1 : 1 + GAMMA])
    assert survival().confidence(offer(MAX_MATCH))[0] == pytest.approx([UNMEASURED_LOOKUP.greedy[-1]] * GAMMA)


def observed(known: LookupSurvival, num_accepted: int, times: int = 1) -> None:
    for _ in range(times):
        seen = offer(2)
        known.advance()
        confidence = known.confidence(seen)
        known.observe(seen, confidence, np.array([GAMMA]), np.array([num_accepted]))


def test_outcomes_move_the_request_fast_and_others_slowly_two_steps_later() -> None:
    known, before = survival(), survival().confidence(offer(2))
    observed(known, 0)
    known.advance()
    assert (known.confidence(offer(2)) == before).all()
    known.advance()
    own, other = known.confidence(offer(2))[0, 0], known.confidence(offer(2, generation=2))[0, 0]
    assert own < other < before[0, 0]


def test_corrections_are_bounded_and_can_be_switched_off() -> None:
    known = survival()
    observed(known, 0, times=5000)
    known.advance()
    common = known.confidence(offer(2, generation=2))[0, 0]
    logit = np.log(UNMEASURED_LOOKUP.greedy[1] / (1 - UNMEASURED_LOOKUP.greedy[1]))
    assert known.confidence(offer(2))[0, 0] >= 1 / (1 + np.exp(-(logit - 2 * MAX_SHIFT))) - 1e-9
    assert common == pytest.approx(1 / (1 + np.exp(-(logit - MAX_SHIFT))))
    still = survival(corrects=False)
    observed(still, 0, times=50)
    assert (still.confidence(offer(2)) == survival().confidence(offer(2))).all()


def test_what_is_known_follows_a_moved_row() -> None:
    known = survival()
    observed(known, 0, times=5)
    known.move_row(0, 1)
    moved = LookupOffer.of([Lookup((1,) * GAMMA, 2)], [1], [1], [True])
    assert (known.confidence(moved) == known.confidence(offer(2))).all()


@pytest.mark.parametrize("curve", [(0.5,) * (MAX_MATCH - 1), (0.5,) * (MAX_MATCH - 1) + (1.0,), (float("nan"),) * 16])
def test_an_unusable_curve_is_refused(curve: tuple[float, ...]) -> None:
    with pytest.raises(RecipeError, match="lookup acceptance"):
        LookupAcceptance(greedy=curve, sampled=(0.5,) * MAX_MATCH)


def greedy(number: int, max_tokens: int = 40) -> GenerationRequest:
    prompt = tuple((number + at) % 4 for at in range(1 + number % 5))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(request_id=str(number), prompt_ids=prompt, sampling=sampling)


@pytest.mark.parametrize("mode", ["fixed", "fixed:2", "threshold:0.5", "early_stop", "lagged_budget", "auto"])
@pytest.mark.parametrize("table", [FLAT, STEEP], ids=["flat", "steep"])
def test_greedy_output_without_a_drafter_is_that_of_plain_decoding(mode: str, table: object) -> None:
    plain = make_loop(ToyTarget(REPEATING, LIMITS), None, parse_scheduler("off"))
    loop = make_loop(
        ToyTarget(REPEATING, LIMITS),
        None,
        parse_scheduler(mode),
        table=table,  # type: ignore[arg-type]
        lookup=UNMEASURED_LOOKUP,
    )
    requests = [greedy(number) for number in range(12)]
    expected, found = run(plain, requests), run(loop, requests)
    assert {key: output.token_ids for key, output in found.items()} == {
        key: output.token_ids for key, output in expected.items()
    }
    if table is FLAT:
        assert loop.totals.num_drafts_accepted > 50, "a greedy text of a small language repeats itself"
        assert loop.totals.num_steps < plain.totals.num_steps / 1.5


def test_lookups_stand_in_where_the_drafter_is_too_dear() -> None:
    drafter = ToyDrafter(REPEATING, LIMITS, gamma=GAMMA, skill=0.1)
    loop = make_loop(
        ToyTarget(REPEATING, LIMITS), drafter, parse_scheduler("auto"), table=DEAR, lookup=UNMEASURED_LOOKUP
    )
    run(loop, [greedy(number) for number in range(12)])
    totals = loop.totals
    assert totals.num_requests_looking_up > totals.num_requests_not_drafting / 2
    assert totals.num_drafts_accepted > 50


def test_a_request_that_asked_for_no_drafts_gets_none() -> None:
    loop = make_loop(ToyTarget(REPEATING, LIMITS), None, parse_scheduler("fixed"), lookup=UNMEASURED_LOOKUP)
    asked = greedy(1)
    run(loop, [replace(asked, max_verify_len=0)])
    assert loop.totals.num_drafts_proposed == 0


def test_auto_looks_nothing_up_where_many_requests_run() -> None:
    limits = EngineLimits(max_requests=MAX_LOOKUP_REQUESTS + 4, max_seq_len=64, max_batch_tokens=64)
    loop = make_loop(ToyTarget(REPEATING, limits), None, parse_scheduler("auto"), table=FLAT, lookup=UNMEASURED_LOOKUP)
    for number in range(limits.max_requests):
        loop.submit(greedy(number, max_tokens=30 if number < 5 else 50))
    for _ in range(20):
        loop.step()
    assert loop.num_running > MAX_LOOKUP_REQUESTS
    assert loop.totals.num_requests_looking_up == 0
    while loop.has_work:
        loop.step()
    assert loop.totals.num_requests_looking_up > 0, "the last few are few"
