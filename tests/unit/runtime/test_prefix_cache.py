"""What is reused, what is kept, and what is never shared."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.errors import RequestError
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.prefix_cache import _num_common
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.steptable.table import StepTable
from tests.support.toy_engines import DEAR, MODERATE, Output, ToyDrafter, ToyLanguage, ToyTarget, make_loop, run

LANGUAGE = ToyLanguage(vocab_size=64, order=3, num_patterns=499)
OFF, FIXED = SchedulerConfig("off"), SchedulerConfig("fixed")


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 64, count).tolist())


SYSTEM = tokens(0, 60)


class Parts:
    def __init__(
        self,
        config: SchedulerConfig = FIXED,
        *,
        max_requests: int = 4,
        max_batch_tokens: int = 200,
        cache: bool = True,
        table: StepTable = MODERATE,
    ) -> None:
        limits = EngineLimits(max_requests, 256, max_batch_tokens)
        self.target, self.drafter = ToyTarget(LANGUAGE, limits), ToyDrafter(LANGUAGE, limits, skill=0.9)
        self.loop: DecodingLoop = make_loop(self.target, self.drafter, config, table=table, prefix_cache=cache)
        self.num_requests = 0

    def ask(self, *prompts: tuple[int, ...], max_tokens: int = 12, salt: str = "", draft: bool = True) -> list[Output]:
        """All of them together, to their ends."""
        requests = []
        for prompt in prompts:
            self.num_requests += 1
            requests.append(
                GenerationRequest(
                    request_id=str(self.num_requests),
                    prompt_ids=prompt,
                    sampling=SamplingParams(max_tokens=max_tokens),
                    max_verify_len=None if draft else 0,
                    cache_salt=salt,
                )
            )
        outputs = run(self.loop, requests)
        return [outputs[request.request_id] for request in requests]

    def reused(self, *prompts: tuple[int, ...], **options: object) -> list[int]:
        return [reused(output) for output in self.ask(*prompts, **options)]  # type: ignore[arg-type]


def reused(output: Output) -> int:
    statistics = output.last.statistics
    assert statistics is not None
    return statistics.num_prompt_tokens_reused


def test_a_prompt_that_came_before_is_computed_for_its_last_tokens_only() -> None:
    parts = Parts()
    first, second = parts.ask(SYSTEM)[0], parts.ask(SYSTEM)[0]
    assert (reused(first), reused(second)) == (0, len(SYSTEM) - 2)
    assert second.token_ids == first.token_ids
    assert parts.target.num_calls.get("move_row") == 1, "its own row, where it stands: nothing is copied"


def test_the_next_turn_of_a_conversation_goes_on_where_the_last_one_ended() -> None:
    parts = Parts()
    turn = SYSTEM
    for at in range(4):
        output = parts.ask(turn)[0]
        if at:  # the last draft block's taps may not have reached the context
            assert len(turn) - 5 - parts.drafter.gamma - 1 <= reused(output) < len(turn) - 4
        turn = (*turn, *output.token_ids, *tokens(at, 5))


def test_drafts_are_accepted_as_often_behind_a_reused_prefix() -> None:
    """D10: a hole in the drafter's context would leave its output exact and its acceptance low."""
    parts = Parts()
    other = (*SYSTEM, *tokens(3, 9))
    parts.ask(SYSTEM)
    found = parts.ask(other, max_tokens=60)[0]
    expected = Parts(cache=False).ask(other, max_tokens=60)[0]
    assert reused(found) > 40
    assert found.token_ids == expected.token_ids
    assert found.last.statistics is not None
    assert expected.last.statistics is not None
    assert found.last.statistics.accepted_lens == expected.last.statistics.accepted_lens


def test_what_the_drafter_never_saw_is_not_reused_for_a_request_that_drafts() -> None:
    parts = Parts()
    assert parts.reused(SYSTEM, draft=False) == [0]
    assert parts.reused(SYSTEM) == [0]
    assert parts.reused(SYSTEM, draft=False) == [len(SYSTEM) - 2]


def test_what_waits_for_the_drafter_is_kept_where_drafting_does_not_pay() -> None:
    parts = Parts(SchedulerConfig("auto"), table=DEAR)
    parts.ask(SYSTEM, max_tokens=3)
    assert "ingest" not in parts.drafter.num_calls
    assert parts.reused(SYSTEM, (*SYSTEM, 7, 7, 7, 7)) == [58, 58]


@pytest.mark.parametrize(("config", "num_lacking"), [(OFF, 0), (FIXED, 1)], ids=["off", "fixed"])
def test_a_running_request_lends_its_prompt(config: SchedulerConfig, num_lacking: int) -> None:
    """The context's entry of a position may depend on the next token: of n common tokens it counts for n - 1."""
    parts = Parts(config)
    parts.loop.submit(GenerationRequest(request_id="long", prompt_ids=SYSTEM, sampling=SamplingParams(max_tokens=100)))
    for _ in range(3):  # read, and ingested
        parts.loop.step()
    assert parts.reused((*SYSTEM[:50], 63, 62, 61)) == [50 - num_lacking]


@pytest.mark.parametrize("config", [OFF, FIXED], ids=["off", "fixed"])
def test_requests_that_arrive_together_read_their_common_beginning_once(config: SchedulerConfig) -> None:
    parts = Parts(config, max_batch_tokens=16)
    prompts = [(*SYSTEM, *tokens(seed, 4)) for seed in range(1, 5)]
    outputs = parts.ask(*prompts)
    assert [reused(output) for output in outputs] == [0, 60, 60, 60]
    assert parts.loop.totals.num_prefill_tokens == 64 + 3 * 4
    assert parts.loop.totals.num_prompt_tokens_reused == 3 * 60
    assert [output.token_ids for output in outputs] == [
        Parts(OFF, cache=False).ask(prompt)[0].token_ids for prompt in prompts
    ]


def test_the_least_recently_used_row_is_given_away_first() -> None:
    parts = Parts(OFF, max_requests=3)
    conversations = [tokens(seed, 40) for seed in range(1, 4)]
    for prompt in conversations:
        assert parts.reused(prompt) == [0]
    assert parts.reused(conversations[0]) == [38]
    assert parts.reused(tokens(9, 40)) == [0]  # takes the row of 1, and not that of 0, which is younger
    assert parts.reused(conversations[0]) == [38]
    assert parts.reused(conversations[1]) == [0]


def test_the_longest_beginning_wins() -> None:
    parts = Parts(OFF)
    parts.ask(SYSTEM[:30])
    parts.ask((*SYSTEM, *tokens(1, 30)))
    parts.ask((*SYSTEM[:45], *tokens(2, 30)))
    assert parts.reused((*SYSTEM, 7, 7, 7)) == [60]


def test_what_others_may_want_is_moved_away_before_a_row_is_taken() -> None:
    parts = Parts(OFF)
    long = (*SYSTEM, *tokens(1, 50))
    parts.ask(long)
    assert parts.reused((*SYSTEM, *tokens(2, 5))) == [60]
    assert parts.reused(long) == [108]


def test_requests_of_different_salts_share_nothing() -> None:
    parts = Parts(OFF)
    assert parts.reused(SYSTEM, salt="one") == [0]
    assert parts.reused(SYSTEM, salt="two") == [0]
    assert parts.reused(SYSTEM) == [0]
    assert parts.reused(SYSTEM, salt="one") == [58]


def test_a_salt_is_a_short_string() -> None:
    request = GenerationRequest(request_id="a", prompt_ids=SYSTEM)
    for salt in ("x" * 257, 3):
        with pytest.raises(RequestError, match="cache_salt: expected a string of at most 256 characters"):
            Parts().loop.submit(replace(request, cache_salt=salt))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["forward", "move_row"])
def test_nothing_is_reused_after_a_failed_call(name: str) -> None:
    parts = Parts(OFF)
    parts.ask(SYSTEM)
    parts.ask((*SYSTEM, *tokens(1, 40)))
    parts.target.failures.append(name)
    output = parts.ask((*SYSTEM, *tokens(2, 40)))[0]
    assert output.last.finish_reason == ("error" if name == "forward" else "length")
    if name == "move_row":
        assert reused(output) == 0, "the prompt is read from its beginning"
        assert output.token_ids == Parts(OFF, cache=False).ask((*SYSTEM, *tokens(2, 40)))[0].token_ids
    assert parts.reused((*SYSTEM, *tokens(1, 40))) == ([0] if name == "forward" else [60])


def test_a_request_that_was_cancelled_leaves_what_it_had_read() -> None:
    parts = Parts(OFF, max_batch_tokens=20)
    parts.loop.submit(GenerationRequest(request_id="a", prompt_ids=SYSTEM))
    parts.loop.step()
    parts.loop.step()
    parts.loop.cancel("a")
    parts.loop.step()
    assert parts.reused(SYSTEM) == [40]


def test_sampled_tokens_are_the_same_with_and_without_reuse() -> None:
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    found = []
    for cache in (True, False):
        parts = Parts(cache=cache)
        parts.ask(SYSTEM, draft=False)
        request = GenerationRequest(request_id="a", prompt_ids=(*SYSTEM, 1), sampling=sampling, max_verify_len=0)
        output = run(parts.loop, [request])["a"]
        assert (reused(output) > 0) == cache
        found.append(output.token_ids)
    assert found[0] == found[1]


def test_matching_costs_little() -> None:
    """32 rows of 4096 tokens that all begin alike, for one request."""
    rows = np.random.default_rng(0).integers(0, 50_000, 4096)
    kept = [np.concatenate((rows[: 4096 - at], rows[:at])) for at in range(32)]
    best = min(_timed(lambda: max(_num_common(rows, each) for each in kept)) for _ in range(20))
    assert best < 1e-3


def _timed(call: object) -> float:
    started = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - started
