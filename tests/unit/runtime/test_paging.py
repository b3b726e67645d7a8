"""Loops whose rows share pages, over toy engines that refuse to read what was not written for a row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.errors import CapacityError
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.support.toy_engines import ToyDrafter, ToyLanguage, collect, run
from tests.support.toy_pages import PAGE_POSITIONS, PagedTarget, paged_loop

LANGUAGE = ToyLanguage(vocab_size=16, order=3, num_patterns=499)
LIMITS = EngineLimits(max_requests=4, max_seq_len=40, max_batch_tokens=16)
GAMMA = 4
WIDTH = -(-(40 + GAMMA + 1) // PAGE_POSITIONS)
AMPLE = 4 * WIDTH + 1
MODES = {
    "off": SchedulerConfig("off"),
    "fixed": SchedulerConfig("fixed", verify_len=3),
    "early_stop": SchedulerConfig("early_stop"),
    "auto": SchedulerConfig("auto"),
}


def requests(temperature: float = 0.0, count: int = 7) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_ids=tuple(np.random.default_rng(index).integers(0, 16, 3 + 3 * index).tolist()),
            sampling=SamplingParams(max_tokens=18, temperature=temperature, seed=index, ignore_eos=True),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_pages", [WIDTH + 1, WIDTH + 4, 2 * WIDTH])
def test_requests_that_are_read_again_get_the_same_greedy_tokens(mode: str, num_pages: int) -> None:
    ample = paged_loop(LANGUAGE, LIMITS, MODES[mode], num_pages=AMPLE)
    expected = {name: output.token_ids for name, output in run(ample, requests()).items()}
    assert ample.totals.num_preempted == 0
    loop = paged_loop(LANGUAGE, LIMITS, MODES[mode], num_pages=num_pages)
    found = run(loop, requests())
    assert {name: output.token_ids for name, output in found.items()} == expected
    assert {name: output.text for name, output in found.items()} == {
        name: "".join(chr(97 + token) for token in tokens) for name, tokens in expected.items()
    }
    assert loop.totals.num_preempted > 0


@pytest.mark.parametrize("mode", ["off", "fixed"])
def test_requests_that_are_read_again_get_the_same_seeded_tokens(mode: str) -> None:
    """No draw is used twice and none is left out. Verify lengths have to be the same: the mode is not adaptive, and a
    step has tokens for all drafts."""
    limits = replace(LIMITS, max_batch_tokens=80)
    ample, scarce = (paged_loop(LANGUAGE, limits, MODES[mode], num_pages=count) for count in (AMPLE, WIDTH + 3))
    expected = {name: output.token_ids for name, output in run(ample, requests(temperature=0.9)).items()}
    assert {name: output.token_ids for name, output in run(scarce, requests(temperature=0.9)).items()} == expected
    assert scarce.totals.num_preempted > 0


def test_the_youngest_gives_its_pages_up_and_the_oldest_never_stops() -> None:
    loop = paged_loop(LANGUAGE, LIMITS, MODES["off"], num_pages=WIDTH + 1)
    outputs: dict[str, object] = {}
    for request in requests():
        loop.submit(request)
    order = []
    while loop.has_work:
        collect(loop, outputs)  # type: ignore[arg-type]
        order += [name for name in outputs if outputs[name].emissions[-1].finish_reason and name not in order]  # type: ignore[attr-defined]
    assert order == [request.request_id for request in requests()], "first come, first served"


def test_a_newcomer_waits_for_pages_and_those_that_run_have_one_to_grow_into() -> None:
    loop = paged_loop(LANGUAGE, LIMITS, MODES["off"], num_pages=WIDTH + 1, has_drafter=False)
    first, second, *_ = requests()
    for request in (first, second):
        loop.submit(request)
    loop.step()
    assert (loop.num_running, loop.num_queued) == (2, 0)
    third = GenerationRequest(request_id="long", prompt_ids=tuple(range(12)) * 3, sampling=SamplingParams(max_tokens=2))
    loop.submit(third)
    loop.step()
    assert (loop.num_running, loop.num_queued) == (2, 1)
    loop.check_integrity()


def test_pages_of_requests_that_end_or_are_cancelled_are_free_at_once() -> None:
    loop = paged_loop(LANGUAGE, LIMITS, MODES["fixed"], num_pages=AMPLE)
    tables = loop._engines.tables
    assert tables is not None
    for request in requests(count=4):
        loop.submit(request)
    loop.step()
    assert tables.pool.num_free < AMPLE - 1
    for request in requests(count=4):
        loop.cancel(request.request_id)
    loop.step()
    assert tables.pool.num_free == AMPLE - 1
    loop.check_integrity()


def test_prompts_that_begin_alike_are_read_once_and_share_their_pages() -> None:
    beginning = tuple(np.random.default_rng(3).integers(0, 16, 5 * PAGE_POSITIONS + 2).tolist())
    alike = [
        GenerationRequest(
            request_id=str(index),
            prompt_ids=(*beginning, index, index),
            sampling=SamplingParams(max_tokens=6, ignore_eos=True),
        )
        for index in range(4)
    ]
    plain = paged_loop(LANGUAGE, LIMITS, MODES["fixed"], num_pages=AMPLE)
    expected = {name: output.token_ids for name, output in run(plain, alike).items()}
    loop = paged_loop(LANGUAGE, LIMITS, MODES["fixed"], num_pages=AMPLE, prefix_cache=True)
    assert {name: output.token_ids for name, output in run(loop, alike).items()} == expected
    assert loop.totals.num_prompt_tokens_reused == 3 * 5 * PAGE_POSITIONS
    assert loop.totals.num_prefill_tokens == sum(len(each.prompt_ids) for each in alike) - 3 * 5 * PAGE_POSITIONS
    again = [GenerationRequest(request_id="again", prompt_ids=alike[0].prompt_ids, sampling=alike[0].sampling)]
    assert run(loop, again)["again"].token_ids == expected["0"]
    assert loop.totals.num_prompt_tokens_reused == 4 * 5 * PAGE_POSITIONS
    other_salt = GenerationRequest(
        request_id="salted", prompt_ids=alike[0].prompt_ids, sampling=alike[0].sampling, cache_salt="pepper"
    )
    assert run(loop, [other_salt])["salted"].token_ids == expected["0"]
    assert loop.totals.num_prompt_tokens_reused == 4 * 5 * PAGE_POSITIONS, "another tenant's pages are not found"


@pytest.mark.parametrize("num_pages", [WIDTH + 3, AMPLE])
def test_pages_are_not_shared_where_the_drafter_keeps_its_context_in_rows_of_its_own(num_pages: int) -> None:
    """Their positions would be missing there. Rows that move take their context with them all the same, and requests
    without drafter share."""
    beginning = tuple(np.random.default_rng(3).integers(0, 16, 3 * PAGE_POSITIONS + 2).tolist())
    alike = [
        GenerationRequest(
            request_id=str(index),
            prompt_ids=(*beginning, index, index),
            sampling=SamplingParams(max_tokens=8 + 4 * index, ignore_eos=True),
        )
        for index in range(4)
    ]
    plain = paged_loop(LANGUAGE, LIMITS, MODES["off"], num_pages=AMPLE)
    expected = {name: output.token_ids for name, output in run(plain, alike).items()}
    loop = paged_loop(LANGUAGE, LIMITS, MODES["fixed"], num_pages=num_pages, prefix_cache=True, holds_context=False)
    assert {name: output.token_ids for name, output in run(loop, alike).items()} == expected
    assert loop.totals.num_prompt_tokens_reused == 0
    assert loop.totals.num_drafts_accepted > 0
    drafter = loop._engines.drafter
    assert isinstance(drafter, ToyDrafter)
    assert ("move_row" in drafter.num_calls) == (num_pages == AMPLE)
    assert (loop.totals.num_preempted > 0) == (num_pages < AMPLE)
    alone = paged_loop(
        LANGUAGE, LIMITS, MODES["off"], num_pages=AMPLE, prefix_cache=True, has_drafter=False, holds_context=False
    )
    run(alone, alike)
    assert alone.totals.num_prompt_tokens_reused > 0


def test_a_page_is_not_shared_where_the_token_behind_it_differs() -> None:
    """What the drafter's context holds of a position may depend on the next token."""
    beginning = tuple(range(2 * PAGE_POSITIONS))
    loop = paged_loop(LANGUAGE, LIMITS, MODES["fixed"], num_pages=AMPLE, prefix_cache=True)
    for index in (9, 11):
        prompt = (*beginning, index, 1, 2, 3)
        run(loop, [GenerationRequest(request_id=str(index), prompt_ids=prompt, sampling=SamplingParams(max_tokens=3))])
    assert loop.totals.num_prompt_tokens_reused == PAGE_POSITIONS


def test_after_a_failed_call_nothing_is_found() -> None:
    loop = paged_loop(LANGUAGE, LIMITS, MODES["fixed"], num_pages=AMPLE, prefix_cache=True)
    first, second = requests(count=7)[-2:]
    run(loop, [second])
    target = loop._engines.target
    assert isinstance(target, PagedTarget)
    target.failures.append("forward")
    assert run(loop, [first])[first.request_id].last.finish_reason == "error"
    run(loop, [second])
    assert loop.totals.num_prompt_tokens_reused == 0


def test_too_few_pages_for_one_request_are_refused() -> None:
    with pytest.raises(CapacityError, match=rf"{WIDTH} pages do not hold one request of full length"):
        paged_loop(LANGUAGE, LIMITS, MODES["off"], num_pages=WIDTH)
