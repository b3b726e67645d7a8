"""Requests join and leave between steps: rows, the token budget, chunked prompts, failures, cancellation."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.step_plan import level_down
from tests.support.loops import ADAPTIVE, FIXED, GAMMA, OFF, Parts, plain, prompt_of, request
from tests.support.toy_engines import MODERATE, STEEP, run, step_table


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
