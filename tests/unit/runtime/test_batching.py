"""Requests join and leave between steps: rows, the token budget, chunked prompts, failures, cancellation."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, TargetBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.loop import ENGINE_FAILED, DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.runtime.step_plan import level_down
from tests.support.toy_engines import (
    LIMITS,
    MODERATE,
    STEEP,
    Output,
    ToyDrafter,
    ToyLanguage,
    ToyTarget,
    collect,
    make_loop,
    run,
    step_table,
)

GAMMA = 7
LANGUAGE = ToyLanguage(vocab_size=16, order=3, num_patterns=499)
FIXED, OFF = SchedulerConfig("fixed"), SchedulerConfig("off")
ADAPTIVE = [SchedulerConfig("early_stop"), SchedulerConfig("lagged_budget")]


def request(name: object, prompt: Any = (1, 2, 3), **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(name), prompt_ids=tuple(prompt), sampling=SamplingParams(**{"max_tokens": 24, **sampling})
    )


class Parts:
    """A loop with its engines in reach."""

    def __init__(
        self, config: SchedulerConfig = FIXED, *, limits: EngineLimits = LIMITS, skill: float = 0.8, **options: Any
    ) -> None:
        self.target = ToyTarget(LANGUAGE, limits)
        self.drafter = ToyDrafter(LANGUAGE, limits, gamma=GAMMA, skill=skill)
        self.loop: DecodingLoop = make_loop(self.target, self.drafter, config, **options)
        self.outputs: dict[str, Output] = {}

    def submit(self, *requests: GenerationRequest) -> None:
        for each in requests:
            self.loop.submit(each)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            collect(self.loop, self.outputs)

    def finish(self) -> dict[str, Output]:
        while self.loop.has_work:
            self.step()
        return self.outputs


def plain(prompt: Any, max_tokens: int = 24) -> list[int]:
    """What greedy decoding gives: from the language, without any loop."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(LANGUAGE.logits(tokens).argmax()))
    return tokens[len(prompt) :]


def prompt_of(length: int, shift: int = 0) -> list[int]:
    return [(7 * at + 3 * shift) % 16 for at in range(length)]


def test_requests_beyond_the_rows_wait_first_come_first_served() -> None:
    parts = Parts(OFF)
    parts.submit(*(request(index, max_tokens=3 + index) for index in range(7)))
    parts.step()
    assert (parts.loop.num_running, parts.loop.num_queued) == (4, 3)
    assert sorted(parts.outputs) == list("0123")
    parts.finish()
    assert list(parts.outputs) == list("0123456"), "in the order of their first tokens"


def test_a_request_that_joins_later_gets_what_it_would_get_alone() -> None:
    parts = Parts()
    for index in range(12):
        parts.submit(request(index, prompt_of(1 + 3 * index, index), max_tokens=5 + 3 * (index % 4)))
        parts.step(1 + index % 3)
    outputs = parts.finish()
    for index in range(12):
        assert outputs[str(index)].token_ids == plain(prompt_of(1 + 3 * index, index), 5 + 3 * (index % 4))
    assert parts.loop.totals.num_rows_moved > 0


@pytest.mark.parametrize("config", [OFF, FIXED, *ADAPTIVE], ids=lambda config: config.mode)
def test_a_batch_drains_to_the_last_request(config: SchedulerConfig) -> None:
    """D38: 64 requests of different lengths, adaptive on, until empty."""
    limits = EngineLimits(max_requests=16, max_seq_len=128, max_batch_tokens=128)
    parts = Parts(config, limits=limits)
    parts.submit(*(request(index, prompt_of(1 + index % 9, index), max_tokens=1 + index) for index in range(64)))
    outputs = parts.finish()
    for index in range(64):
        assert outputs[str(index)].token_ids == plain(prompt_of(1 + index % 9, index), 1 + index)
    assert parts.loop.num_running == 0


@pytest.mark.parametrize("num_rows", [63, 64, 65, 112, 224])
def test_any_number_of_verification_rows_in_one_call(num_rows: int) -> None:
    """D41: counts next to and beyond the widths that kernels were written for."""
    num_requests = -(-num_rows // (1 + GAMMA))
    limits = EngineLimits(max_requests=num_requests, max_seq_len=64, max_batch_tokens=num_rows)
    parts = Parts(limits=limits)
    parts.submit(*(request(index, prompt_of(2, index)) for index in range(num_requests)))
    outputs = parts.finish()
    assert max(len(batch.logit_rows) for batch in parts.target.batches) == num_rows
    for index in range(num_requests):
        assert outputs[str(index)].token_ids == plain(prompt_of(2, index))


def test_a_long_prompt_is_read_in_chunks_beside_decoding_requests() -> None:
    """D17: one request decodes while a prompt of several chunks is read."""
    limits = EngineLimits(max_requests=2, max_seq_len=256, max_batch_tokens=16)
    parts = Parts(limits=limits)
    parts.submit(request("short", prompt_of(3), max_tokens=60))
    parts.step(2)
    parts.submit(request("long", prompt_of(100, 1), max_tokens=10))
    outputs = parts.finish()
    assert outputs["short"].token_ids == plain(prompt_of(3), 60)
    assert outputs["long"].token_ids == plain(prompt_of(100, 1), 10)
    mixed = [batch for batch in parts.target.batches if 0 < batch.num_decode < len(batch.rows)]
    assert len(mixed) >= 5, "the prompt and the decoding request shared steps"
    assert all(len(batch.token_ids) <= 16 for batch in parts.target.batches)


def test_several_prompts_are_read_in_one_step_and_in_order_of_arrival() -> None:
    limits = EngineLimits(max_requests=4, max_seq_len=64, max_batch_tokens=20)
    parts = Parts(limits=limits)
    parts.submit(*(request(index, prompt_of(8, index)) for index in range(4)))
    parts.step()
    assert parts.target.batches[0].query_lengths.tolist() == [8, 8, 4]
    assert sorted(parts.outputs) == ["0", "1"]
    outputs = parts.finish()
    for index in range(4):
        assert outputs[str(index)].token_ids == plain(prompt_of(8, index))


def test_drafts_leave_at_least_half_of_the_budget_to_prompts() -> None:
    limits = EngineLimits(max_requests=3, max_seq_len=256, max_batch_tokens=18)
    parts = Parts(limits=limits, skill=1.0)
    parts.submit(request(0, max_tokens=100), request(1, max_tokens=100))
    parts.step(2)
    parts.submit(request("long", prompt_of(60)))
    parts.step()
    batch = parts.target.batches[-1]
    assert batch.query_lengths.tolist() == [5, 5, 8], "two anchors, 16 left: 8 for the prompt, 8 for drafts"


def test_the_budget_levels_caps_down() -> None:
    assert level_down(np.array([7, 7, 7]), 21).tolist() == [7, 7, 7]
    assert level_down(np.array([7, 7, 7]), 10).tolist() == [4, 3, 3]
    assert level_down(np.array([1, 7, 2, 7]), 9).tolist() == [1, 3, 2, 3]
    assert level_down(np.array([2, 2]), 0).tolist() == [0, 0]
    assert level_down(np.array([], dtype=np.int64), 0).tolist() == []


def test_a_full_batch_at_the_token_limit_decodes_without_drafts() -> None:
    limits = EngineLimits(max_requests=4, max_seq_len=64, max_batch_tokens=4)
    parts = Parts(limits=limits)
    parts.submit(*(request(index, prompt_of(5, index)) for index in range(4)))
    outputs = parts.finish()
    for index in range(4):
        assert outputs[str(index)].token_ids == plain(prompt_of(5, index))


def test_prompts_are_counted_as_batch_tokens_when_drafts_are_priced() -> None:
    """From 40 tokens on every token triples the price: beside a prompt chunk no draft pays, without one they do."""
    table = step_table(lambda count: 10.0 if count < 40 else 10.0 * 3.0 ** (count - 40))
    limits = EngineLimits(max_requests=2, max_seq_len=256, max_batch_tokens=64)
    parts = Parts(SchedulerConfig("early_stop"), limits=limits, skill=1.0, table=table)
    parts.submit(request("a", max_tokens=200))
    parts.step(2)
    assert parts.loop.last_step.num_drafts_verified == GAMMA
    parts.submit(request("long", prompt_of(100)))
    parts.step()
    assert (parts.loop.last_step.num_prefill_tokens, parts.loop.last_step.num_drafts_verified) == (
        40,
        0,
    )  # and the chunk ends where a step would take more than four times a plain one


def test_idle_requests_cost_nothing_and_rows_stay_dense() -> None:
    parts = Parts(OFF)
    parts.submit(*(request(index, max_tokens=2 + 4 * index) for index in range(4)))
    while parts.loop.has_work:
        parts.step()
        rows = parts.target.batches[-1].rows.tolist()
        assert sorted(rows) == list(range(len(rows)))
    # rows 0 1 2 3; 0 leaves: 3 1 2; 1 leaves: 3 2; 2 is in the last row
    assert parts.target.num_calls["move_row"] == parts.loop.totals.num_rows_moved == 2


def test_live_tokens_only_are_moved() -> None:
    parts = Parts(FIXED)
    moved: list[int] = []
    original = parts.target.move_row

    def spy(source: int, destination: int, num_positions: int) -> None:
        moved.append(num_positions)
        original(source, destination, num_positions)

    parts.target.move_row = spy  # type: ignore[method-assign]
    parts.submit(request("a", max_tokens=4), request("b", prompt_of(5), max_tokens=30))
    while not moved:
        parts.step()
    assert moved == [5 + len(parts.outputs["b"].token_ids) - 1]
    parts.finish()
    assert len(moved) == 1


def test_taps_of_every_committed_position_are_ingested_once() -> None:
    parts = Parts(limits=EngineLimits(max_requests=2, max_seq_len=128, max_batch_tokens=16))
    parts.submit(request("a", prompt_of(40), max_tokens=30))
    parts.step(12)  # the toy drafter refuses holes, repetitions and wrong positions
    length = int((parts.drafter.store.tokens[0] >= 0).sum())
    expected = [*prompt_of(40), *parts.outputs["a"].token_ids][:length]
    assert parts.drafter.store.tokens[0, :length].tolist() == expected
    assert length >= 40


def test_a_request_that_can_never_draft_is_not_ingested() -> None:
    parts = Parts()
    parts.submit(request("a", max_tokens=2), request("b", max_tokens=1))
    parts.finish()
    assert "ingest" not in parts.drafter.num_calls
    assert "draft" not in parts.drafter.num_calls


@pytest.mark.parametrize("name", ["forward", "ingest", "draft"])
def test_a_failed_engine_call_ends_its_requests_and_the_loop_goes_on(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts = Parts()
    parts.submit(request(0, prompt_of(4)), request(1, prompt_of(5)))
    parts.step(3)
    engine = parts.target if name == "forward" else parts.drafter
    engine.failures.append(name)
    parts.submit(*(request(index, prompt_of(index)) for index in range(2, 6)))
    with caplog.at_level(logging.ERROR):
        outputs = parts.finish()
    failed = {each for each, output in outputs.items() if output.last.finish_reason == "error"}
    assert failed == ({"0", "1", "2", "3"} if name == "forward" else {"0", "1"})
    for each in failed:
        assert outputs[each].last.error == ENGINE_FAILED
        assert outputs[each].last.statistics is not None
    assert "as the test wants it" in caplog.text, "the cause is logged, and only there"
    for index in range(2, 6):
        if str(index) not in failed:
            assert outputs[str(index)].token_ids == plain(prompt_of(index))
    assert parts.loop.num_running == 0


@pytest.mark.parametrize("engine", ["target", "drafter"])
def test_a_failed_move_ends_the_request_that_was_to_move(engine: str) -> None:
    parts = Parts()
    parts.submit(*(request(index, prompt_of(3, index), max_tokens=6 + 20 * (index > 0)) for index in range(4)))
    getattr(parts, engine).failures.append("move_row")
    outputs = parts.finish()
    reasons = {name: output.last.finish_reason for name, output in outputs.items()}
    assert reasons == {"0": "length", "1": "length", "2": "length", "3": "error"}
    for index in (1, 2):
        assert outputs[str(index)].token_ids == plain(prompt_of(3, index), 26)


def test_target_logits_that_are_not_finite_fail_one_request() -> None:
    parts = Parts(OFF)

    def poison(batch: TargetBatch, logits: np.ndarray) -> None:
        if len(parts.target.batches) == 5:
            logits[1, 3] = np.nan

    parts.target.edit_logits = poison
    parts.submit(*(request(index, prompt_of(3, index)) for index in range(3)))
    outputs = parts.finish()
    assert [outputs[str(index)].last.finish_reason for index in range(3)] == ["length", "error", "length"]
    assert len(outputs["1"].token_ids) == 4
    assert "not finite" in str(outputs["1"].last.error)
    assert outputs["2"].token_ids == plain(prompt_of(3, 2))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "config", [FIXED, *ADAPTIVE, SchedulerConfig("threshold", threshold=0.2)], ids=lambda c: c.mode
)
def test_a_drafter_gone_mad_changes_no_output(config: SchedulerConfig, poison: float) -> None:
    """D27: logits, confidences and ids of the drafter are nonsense; greedy text stays the target's."""
    parts = Parts(config)

    def poison_output(batch: DraftBatch, output: DraftOutput) -> None:
        call = parts.drafter.num_calls["draft"]
        if output.draft_logits is not None:
            output.draft_logits[:, call % GAMMA, :] = poison
        output.confidence_logits[:, (call + 2) % GAMMA] = poison
        if call % 3 == 0:
            output.draft_ids[:, call % GAMMA] = (-1, 16, 10**9)[call % 9 // 3]

    parts.drafter.edit_output = poison_output
    parts.submit(*(request(index, prompt_of(3, index)) for index in range(4)))
    sampled = request("sampled", prompt_of(2), temperature=1.0, seed=3)
    parts.submit(sampled)
    outputs = parts.finish()
    for index in range(4):
        assert outputs[str(index)].token_ids == plain(prompt_of(3, index))
    assert outputs["sampled"].last.finish_reason == "length"
    assert all(0 <= token < 16 for token in outputs["sampled"].token_ids)


def test_a_decode_that_raises_fails_one_request(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [(0,), (1,), (2,), (0, 1), (1, 2), (2, 0)]
    expected = [plain(prompt, 12) for prompt in prompts]
    unspeakable = next(token for token in range(3, 16) if 0 < sum(token in ids for ids in expected) < 6)

    def decode(ids: Any) -> str:
        if unspeakable in ids:
            raise ValueError("no such token")
        return "x" * len(ids)

    parts = Parts(decode=decode)
    parts.submit(*(request(index, prompt, max_tokens=12) for index, prompt in enumerate(prompts)))
    with caplog.at_level(logging.ERROR):
        outputs = parts.finish()
    reasons = [outputs[str(index)].last.finish_reason for index in range(6)]
    assert set(reasons) == {"length", "error"}
    for index, reason in enumerate(reasons):
        if reason == "length":
            assert outputs[str(index)].token_ids == expected[index]
        else:
            assert outputs[str(index)].last.error == (
                "the generated tokens cannot be turned into text; report this with the request"
            )
    assert "no such token" in caplog.text


def test_cancelling_a_hundred_requests_in_mid_block_frees_every_row() -> None:
    """D41"""
    parts = Parts(SchedulerConfig("early_stop"), table=STEEP)
    for index in range(100):
        parts.submit(request(index, prompt_of(1 + index % 7, index), max_tokens=50))
        parts.step(1 + index % 2)
        assert parts.loop.cancel(str(index))
    outputs = parts.finish()
    assert {output.last.finish_reason for output in outputs.values()} == {"cancelled"}
    assert len(outputs) == 100
    assert (parts.loop.num_running, parts.loop.num_queued) == (0, 0)
    parts.submit(request("after"))
    assert parts.finish()["after"].token_ids == plain((1, 2, 3))


def test_cancelling_leaves_the_others_as_they_are() -> None:
    parts = Parts()
    parts.submit(*(request(index, prompt_of(2, index)) for index in range(6)))
    parts.step(3)
    for name in ("0", "2", "5"):
        assert parts.loop.cancel(name)
        assert parts.loop.cancel(name), "a second time changes nothing"
    assert not parts.loop.cancel("unknown")
    outputs = parts.finish()
    assert not parts.loop.cancel("0"), "it is over"
    for index in range(6):
        output = outputs[str(index)]
        if index in (0, 2, 5):
            assert output.last.finish_reason == "cancelled"
            assert output.token_ids == plain(prompt_of(2, index))[: len(output.token_ids)]
        else:
            assert output.token_ids == plain(prompt_of(2, index))
    assert outputs["5"].token_ids == [], "it never had a row"


def test_a_step_record_says_what_the_step_did() -> None:
    parts = Parts(SchedulerConfig("early_stop"), table=MODERATE, skill=1.0)
    parts.submit(request("a", prompt_of(5)), request("b", prompt_of(4)))
    parts.step()
    record = parts.loop.last_step
    assert (record.num_requests, record.num_prefill_tokens, record.batch_tokens) == (0, 9, 9)
    assert (record.num_tokens_emitted, record.num_drafts_proposed) == (2, 0)
    parts.step()
    record = parts.loop.last_step
    assert (record.num_requests, record.num_prefill_tokens) == (2, 0)
    assert record.num_drafts_proposed == 2 * GAMMA
    assert record.batch_tokens == 2 + record.num_drafts_verified
    assert record.num_tokens_emitted == 2 + record.num_drafts_accepted
    assert min(record.draft_ms, record.verify_ms, record.outside_ms) > 0
    assert record.total_ms == pytest.approx(
        record.ingest_ms + record.draft_ms + record.verify_ms + record.outside_ms, rel=1e-9
    )


def test_the_same_requests_give_the_same_steps() -> None:
    def verify_lens(config: SchedulerConfig) -> list[list[int]]:
        loop = Parts(config).loop
        outputs = run(loop, [request(index, prompt_of(2, index), temperature=1.0, seed=index) for index in range(6)])
        return [output.last.statistics.verify_lens for output in outputs.values() if output.last.statistics]

    for config in ADAPTIVE:
        assert verify_lens(config) == verify_lens(config)


def test_a_moved_request_keeps_its_confidence_history() -> None:
    """Low confidences two steps old leave nothing to verify;
    a request without history would be verified at full length."""
    parts = Parts(SchedulerConfig("lagged_budget"), table=MODERATE, skill=-1.0)
    parts.submit(request("first", max_tokens=6), request("moved", prompt_of(5), max_tokens=30))
    outputs = parts.finish()
    assert parts.loop.totals.num_rows_moved == 1
    statistics = outputs["moved"].last.statistics
    assert statistics is not None
    assert statistics.verify_lens[:2] == [GAMMA, GAMMA]
    assert sum(statistics.verify_lens[2:]) == 0
