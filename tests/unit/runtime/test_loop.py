"""The loop on toy engines: the same output with and without drafts, exact ends, exact lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig, SchedulerMode
from dspark_trt.errors import CapacityError, RecipeError, RequestError
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.support.loops import GAMMA, LANGUAGE, OFF, decode_alone, loop_with, modes, request
from tests.support.toy_engines import FLAT, LIMITS, MODERATE, ToyDrafter, ToyTarget, letters, make_loop, run

PROMPTS = [[(3 * index + 5 * at) % 16 for at in range(1 + 2 * index)] for index in range(8)]


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "in a batch"])
@pytest.mark.parametrize("verify_len", range(GAMMA + 1))
def test_greedy_output_does_not_depend_on_the_verify_length(verify_len: int, batched: bool) -> None:
    """D24, D31: with and without drafts, alone and among others, the text is the same."""
    requests = [request(index, prompt) for index, prompt in enumerate(PROMPTS)]
    expected = {each.request_id: decode_alone(each, OFF).token_ids for each in requests}
    assert len({tuple(ids) for ids in expected.values()}) == len(requests), "the toy language tells prompts apart"
    config = SchedulerConfig("fixed", verify_len=verify_len)
    if batched:
        found = {name: output.token_ids for name, output in run(loop_with(config), requests).items()}
    else:
        found = {each.request_id: decode_alone(each, config).token_ids for each in requests}
    assert found == expected


@modes
@pytest.mark.parametrize("skill", [1.0, 0.5, -1.0])
def test_greedy_output_does_not_depend_on_the_scheduler(config: SchedulerConfig, skill: float) -> None:
    requests = [request(index, prompt) for index, prompt in enumerate(PROMPTS)]
    outputs = run(loop_with(config, skill=skill), requests)
    for each in requests:
        assert outputs[each.request_id].token_ids == decode_alone(each, OFF).token_ids


def test_without_a_drafter_the_loop_decodes_plainly() -> None:
    loop = make_loop(ToyTarget(LANGUAGE, LIMITS), None, SchedulerConfig("early_stop"))
    output = run(loop, [request("a")])["a"]
    assert output.token_ids == decode_alone(request("a"), OFF).token_ids
    assert output.last.statistics.num_drafts_proposed == 0


def test_prompts_that_do_not_fit_are_refused_and_nothing_is_queued() -> None:
    loop = loop_with(OFF)
    for prompt in ((), tuple([1] * (LIMITS.max_seq_len + 1))):
        with pytest.raises(RequestError, match="prompt_ids"):
            loop.submit(request("a", prompt))
    assert not loop.has_work
    assert loop.step() == []


def test_a_request_id_in_use_is_refused() -> None:
    loop = loop_with(OFF)
    loop.submit(request("a"))
    with pytest.raises(RequestError, match="'a' is in use"):
        loop.submit(request("a"))
    run(loop, [])
    loop.submit(request("a"))


@modes
def test_a_banned_token_never_appears_and_min_p_acts_on_verified_drafts(config: SchedulerConfig) -> None:
    """D22: the drafter proposes the top token in every slot; the target's processors must forbid it all the same."""
    top = decode_alone(request("a"), OFF).token_ids
    banned = max(set(top), key=top.count)
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}):
        output = decode_alone(request("a", logit_bias={banned: -100.0}, **settings), config, skill=1.0)
        assert banned not in output.token_ids
    strict = decode_alone(request("a", temperature=3.0, min_p=1.0, seed=1), config)
    assert strict.token_ids == top, "min_p = 1 leaves the most probable token"


@modes
def test_bad_words_are_never_completed_across_drafts(config: SchedulerConfig) -> None:
    plain = decode_alone(request("a"), OFF).token_ids
    pair = tuple(plain[3:5])
    output = decode_alone(request("a", bad_words=(pair,)), config, skill=1.0)
    assert pair not in list(zip(output.token_ids, output.token_ids[1:], strict=False))
    assert output.token_ids[:4] == plain[:4]


@modes
def test_log_probs_come_one_for_each_token_and_equal_the_raw_log_softmax(config: SchedulerConfig) -> None:
    """D30"""
    output = decode_alone(request("a", temperature=0.8, top_p=0.9, seed=3, num_log_probs=5), config)
    assert len(output.log_probs) == len(output.top_log_probs) == len(output.token_ids) == 24
    context = [1, 2, 3]
    for token, log_prob, top in zip(output.token_ids, output.log_probs, output.top_log_probs, strict=True):
        logits = LANGUAGE.logits(context).astype(np.float64)
        raw = logits - np.log(np.exp(logits).sum())
        assert log_prob == pytest.approx(raw[token], abs=1e-5)
        assert [each for each, _ in top] == np.argsort(-raw)[:5].tolist()
        context.append(token)


def sampled(name: object, prompt: Any, seed: int, **sampling: Any) -> GenerationRequest:
    return request(name, prompt, temperature=1.1, top_p=0.95, seed=seed, **sampling)


@pytest.mark.parametrize("verify_len", [0, 1, 3, GAMMA])
def test_a_seed_and_fixed_verify_lengths_give_the_same_output_in_any_company(verify_len: int) -> None:
    """D23"""
    config = SchedulerConfig("fixed", verify_len=verify_len)
    requests = [sampled(index, prompt, seed=42) for index, prompt in enumerate(PROMPTS)]
    alone = {each.request_id: decode_alone(each, config).token_ids for each in requests}
    assert {name: output.token_ids for name, output in run(loop_with(config), requests).items()} == alone
    assert {name: output.token_ids for name, output in run(loop_with(config), requests[::-1]).items()} == alone
    assert len({tuple(ids) for ids in alone.values()}) == len(alone)


def test_another_seed_or_sequence_index_gives_another_output() -> None:
    config = SchedulerConfig("fixed")
    first, again, other = (decode_alone(sampled("a", (1, 2), seed), config).token_ids for seed in (1, 1, 2))
    assert first == again != other
    second = GenerationRequest(
        request_id="a", prompt_ids=(1, 2), sampling=sampled("a", (1, 2), 1).sampling, sequence_index=1
    )
    assert decode_alone(second, config).token_ids != first


def test_without_a_seed_two_runs_differ() -> None:
    """False alarm: two independent samples of 40 tokens at temperature 2 are equal with probability below 1e-20."""
    runs = [decode_alone(request("a", temperature=2.0, max_tokens=40), SchedulerConfig("fixed")) for _ in range(2)]
    assert runs[0].token_ids != runs[1].token_ids


@pytest.mark.parametrize("mode", ["early_stop", "lagged_budget", "threshold"])
def test_live_requests_of_one_random_key_are_verified_at_full_length(mode: SchedulerMode) -> None:
    """Ranking one by the other would look ahead: they draw the same tokens."""
    config = SchedulerConfig(mode, threshold=0.99 if mode == "threshold" else None)
    duplicates = [sampled(name, (1, 2, 3), seed=7) for name in "ab"]
    other = sampled("c", (1, 2, 3), seed=8)
    outputs = run(loop_with(config, skill=-1.0), [*duplicates, other])
    for name in "ab":
        statistics = outputs[name].last.statistics
        generated = 1 + np.cumsum([0, *statistics.accepted_lens[:-1]])
        assert statistics.verify_lens == np.minimum(GAMMA, 24 - generated - 1).tolist()
    assert outputs["a"].token_ids == outputs["b"].token_ids
    mean = outputs["c"].last.statistics.mean_verify_len
    assert mean < 4, "the drafter is bad on purpose: the others are cut short"


@modes
def test_max_verify_len_of_a_request_is_kept(config: SchedulerConfig) -> None:
    limited = GenerationRequest(
        request_id="a", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=20), max_verify_len=2
    )
    none = GenerationRequest(
        request_id="b", prompt_ids=(1, 3), sampling=SamplingParams(max_tokens=20), max_verify_len=0
    )
    outputs = run(loop_with(config, skill=1.0, table=FLAT), [limited, none, request("c", (1, 4), max_tokens=20)])
    assert max(outputs["a"].last.statistics.verify_lens) == (0 if config.mode == "off" else 2)
    assert outputs["b"].last.statistics.num_drafts_proposed == 0
    assert max(outputs["c"].last.statistics.verify_lens) == (0 if config.mode == "off" else GAMMA)


def test_statistics_add_up() -> None:
    loop = loop_with(SchedulerConfig("lagged_budget"))
    outputs = run(loop, [request(index, prompt) for index, prompt in enumerate(PROMPTS)])
    for index, prompt in enumerate(PROMPTS):
        output = outputs[str(index)]
        statistics = output.last.statistics
        assert statistics is not None
        assert statistics.num_prompt_tokens == len(prompt)
        assert statistics.num_generated_tokens == len(output.token_ids) == 1 + sum(statistics.accepted_lens) == 24
        assert statistics.num_steps == len(statistics.accepted_lens) == len(statistics.verify_lens)
        assert statistics.accepted_len == pytest.approx(23 / statistics.num_steps)
        assert statistics.num_drafts_accepted == 23 - statistics.num_steps
        assert statistics.num_drafts_verified == sum(statistics.verify_lens) == sum(statistics.verified_per_position)
        assert statistics.num_drafts_accepted == sum(statistics.accepted_per_position)
        assert statistics.num_drafts_proposed >= statistics.num_drafts_verified
        assert statistics.verified_per_position == sorted(statistics.verified_per_position, reverse=True)
        assert 0 <= statistics.queue_ms <= statistics.first_token_ms <= statistics.total_ms
        assert statistics.draft_ms + statistics.verify_ms <= statistics.total_ms
        described = statistics.as_dict()
        assert described["accepted_len"] == statistics.accepted_len
        assert described["num_steps"] == statistics.num_steps
    totals = loop.totals
    every = [outputs[str(index)].last.statistics for index in range(len(PROMPTS))]
    assert totals.num_tokens_emitted == 24 * len(PROMPTS)
    assert totals.num_prefill_tokens == sum(map(len, PROMPTS))
    assert totals.num_drafts_proposed == sum(each.num_drafts_proposed for each in every)
    assert totals.num_drafts_verified == sum(each.num_drafts_verified for each in every)
    assert totals.num_drafts_accepted == sum(each.num_drafts_accepted for each in every)
    assert totals.num_finished == {"length": len(PROMPTS)}


def test_verified_tokens_drop_when_confidence_is_low() -> None:
    """D39: cutting happens before verification, so that it saves work."""

    def mean(skill: float) -> float:
        return decode_alone(request("a"), SchedulerConfig("early_stop"), skill=skill).last.statistics.mean_verify_len

    assert mean(-1.0) < 1.0 < 4.0 < mean(1.0)


def test_one_emission_for_each_request_and_step() -> None:
    loop = loop_with(SchedulerConfig("fixed"), skill=1.0)
    for index in range(3):
        loop.submit(request(index, PROMPTS[index]))
    while loop.has_work:
        names = [emission.request_id for emission in loop.step()]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("mode", ["early_stop", "lagged_budget"])
def test_an_adaptive_mode_without_a_step_table_is_refused(mode: SchedulerMode) -> None:
    with pytest.raises(RecipeError, match="expected a step table"):
        loop_with(SchedulerConfig(mode), table=None)
    loop_with(SchedulerConfig("fixed"), table=None)


def test_engines_that_do_not_fit_each_other_are_refused() -> None:
    target = ToyTarget(LANGUAGE, LIMITS)
    with pytest.raises(CapacityError, match="build both with the same limits"):
        make_loop(target, ToyDrafter(LANGUAGE, EngineLimits(4, 32, 64)), SchedulerConfig("fixed"))
    with pytest.raises(CapacityError, match="max_batch_tokens = 3"):
        loop_with(OFF, limits=EngineLimits(4, 64, 3))
    with pytest.raises(RecipeError, match="expected 4 slots, found 2"):
        DecodingLoop(
            target=target,
            drafter=ToyDrafter(LANGUAGE, LIMITS, gamma=4),
            step_table=MODERATE,
            calibration=Calibration.from_temperatures([1.0, 1.0]),
            eos_token_ids=[],
            decode=letters,
            scheduler=SchedulerConfig("fixed"),
        )
