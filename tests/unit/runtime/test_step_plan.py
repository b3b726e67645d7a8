"""How prompts share a step with requests that decode."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_trt.runtime.corrections import TimeCorrection
from dspark_trt.runtime.draft_choice import DraftChoice
from dspark_trt.runtime.prices import StepPrices
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.runtime.state import RequestState, new_state
from dspark_trt.runtime.step_plan import MIN_CHUNK_TOKENS, StepPlan, max_prefill_tokens, plan_step
from tests.support.toy_engines import step_table

NUM_TOKENS = 256  # max_batch_tokens


def prices(ms_per_token: float) -> StepPrices:
    return StepPrices(step_table(lambda count: 20.0 + ms_per_token * count, num_tokens=NUM_TOKENS), TimeCorrection())


def request(number: int, num_prompt_tokens: int, num_prefilled: int = 0) -> RequestState:
    asked = GenerationRequest(
        request_id=str(number), prompt_ids=(1,) * num_prompt_tokens, sampling=SamplingParams(max_tokens=50)
    )
    state = new_state(asked, max_seq_len=100_000, eos_token_ids=(), decode=lambda ids: "")
    state.occupy(number, generation=number)
    state.commit_prompt(num_prefilled)
    return state


def plan(
    prompts: list[RequestState], *, num_decode: int = 2, max_prefill: int = NUM_TOKENS, num_drafts: int = 0
) -> StepPlan:
    decode = [request(100 + number, 1, 1) for number in range(num_decode)]
    nobody = np.zeros(num_decode, dtype=np.bool_)
    choice = DraftChoice(num_drafts, np.full(num_decode, num_drafts > 0, np.bool_), nobody, nobody)
    return plan_step(
        decode,
        prompts,
        choice=choice,
        caps=np.full(num_decode, num_drafts, np.int64),
        max_batch_tokens=NUM_TOKENS,
        max_prefill_tokens=max_prefill,
    )


def chunks(step: StepPlan) -> dict[int, int]:
    return {chunk.state.row: chunk.num_tokens for chunk in step.prefill}


@pytest.mark.parametrize("ms_per_token", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("max_stretch", [1.5, 3.0])
def test_a_long_prompt_never_stretches_a_step_beyond_the_factor(ms_per_token: float, max_stretch: float) -> None:
    priced, num_decode = prices(ms_per_token), 4
    allowed = max_prefill_tokens(priced, num_decode, 0.0, max_batch_tokens=NUM_TOKENS, max_stretch=max_stretch)
    curve = priced.plain(num_decode, 0.0, 0, NUM_TOKENS)
    assert allowed > MIN_CHUNK_TOKENS
    assert curve[allowed] <= max_stretch * curve[0]
    step = plan([request(0, 10_000)], num_decode=num_decode, max_prefill=allowed)
    assert step.num_prefill_tokens == allowed
    if allowed < NUM_TOKENS - num_decode:  # and no less than the factor allows
        assert curve[allowed + 1] > max_stretch * curve[0]


def test_prompts_move_on_where_every_token_is_dear() -> None:
    assert max_prefill_tokens(prices(50.0), 4, 0.0, max_batch_tokens=NUM_TOKENS, max_stretch=1.1) == MIN_CHUNK_TOKENS


def test_nobody_who_decodes_or_no_table_means_no_limit() -> None:
    assert max_prefill_tokens(prices(50.0), 0, 0.0, max_batch_tokens=NUM_TOKENS, max_stretch=1.1) == NUM_TOKENS
    assert max_prefill_tokens(None, 4, 0.0, max_batch_tokens=NUM_TOKENS, max_stretch=1.1) == NUM_TOKENS - 4
    assert max_prefill_tokens(None, NUM_TOKENS + 1, 0.0, max_batch_tokens=NUM_TOKENS, max_stretch=1.1) == 0


def test_short_prompts_do_not_wait_for_a_long_one_that_came_first() -> None:
    assert chunks(plan([request(0, 10_000), request(1, 20), request(2, 10)], max_prefill=64)) == {0: 34, 1: 20, 2: 10}


def test_a_long_prompt_moves_on_however_many_short_ones_keep_coming() -> None:
    long, num_steps = request(0, 1000), 0
    while long.num_unfilled:
        num_steps += 1
        newcomers = [request(number, 60) for number in range(1, 9)]
        step = plan([long, *newcomers], max_prefill=64)
        assert step.num_prefill_tokens == 64
        long.commit_prompt(chunks(step)[0])
    assert num_steps == -(-1000 // 32)


def test_what_short_prompts_leave_goes_to_the_long_one() -> None:
    assert chunks(plan([request(0, 10_000), request(1, 4)], max_prefill=64)) == {0: 60, 1: 4}


def test_the_first_to_come_is_first_in_any_order_of_the_list() -> None:
    assert chunks(plan([request(5, 500), request(3, 500)], max_prefill=64)) == {3: 32, 5: 32}
    assert chunks(plan([request(5, 500), request(3, 500), request(4, 500)], max_prefill=64))[3] == 32


def test_only_unread_tokens_count() -> None:
    assert chunks(plan([request(0, 100, num_prefilled=90)])) == {0: 10}


def test_drafts_never_leave_prompts_less_than_half() -> None:
    step = plan([request(0, 10_000)], num_decode=40, num_drafts=7)
    room = NUM_TOKENS - 40
    assert step.num_prefill_tokens == room // 2
    assert step.caps.sum() == room - room // 2
    assert step.caps.max() - step.caps.min() <= 1


def test_drafts_have_what_prompts_do_not_need() -> None:
    step = plan([request(0, 5)], num_decode=4, num_drafts=7)
    assert (step.num_prefill_tokens, step.caps.tolist()) == (5, [7] * 4)
