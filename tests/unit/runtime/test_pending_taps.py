"""Taps that wait for the drafter: nothing is lost, nothing comes twice, everything in order."""

from __future__ import annotations

import numpy as np

from dspark_trt.contract.protocol import IngestBatch
from dspark_trt.runtime.kv import CacheLengths
from dspark_trt.runtime.pending_taps import MAX_PENDING_POSITIONS, PendingTaps
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.runtime.state import RequestState, new_state


def request(row: int) -> RequestState:
    asked = GenerationRequest(request_id=str(row), prompt_ids=(1,), sampling=SamplingParams(max_tokens=500))
    state = new_state(asked, max_seq_len=1024, eos_token_ids=(), decode=lambda ids: "")
    state.occupy(row, generation=row)
    return state


def taps(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)[:, None]


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def taken(batch: IngestBatch) -> list[tuple[int, int, list[float]]]:
    """(row, past length, taps) of each segment."""
    ends = np.cumsum(batch.query_lengths)
    segments = zip(batch.rows, batch.past_lengths, ends - batch.query_lengths, ends, strict=True)
    return [(int(row), int(past), batch.taps[begin:end, 0].tolist()) for row, past, begin, end in segments]


def test_what_several_steps_left_comes_in_the_order_of_positions() -> None:
    pending, context = PendingTaps(), CacheLengths(num_rows=4, capacity=512)
    first, second = request(2), request(0)
    context.committed[[2, 0]] = 5, 9
    pending.keep([(first, 0, 2), (second, 3, 1)], taps(1, 2, -1, 10), ids(10, 11, 0, 20))
    pending.keep([(second, 0, 2), (first, 2, 1)], taps(11, 12, 3), ids(21, 22, 12))
    assert (pending.num_positions(first), pending.num_positions(second)) == (3, 3)
    found = pending.take([first, second], context, max_tokens=100)
    assert found is not None
    assert found[0] == [first, second]
    assert taken(found[1]) == [(2, 5, [1, 2, 3]), (0, 9, [10, 11, 12])]
    assert pending.take([first, second], context, max_tokens=100) is None


def test_each_position_comes_with_its_token_and_the_one_behind_it_however_calls_are_cut() -> None:
    pending, context = PendingTaps(), CacheLengths(num_rows=1, capacity=64)
    state = request(0)
    state.commit_prompt(1)
    state.push_token(14)
    pending.keep([(state, 1, 3)], taps(0, 1, 2, 3, 9), ids(99, 11, 12, 13, 77))  # 77: a draft that was rejected
    state.push_token(15)
    pending.keep([(state, 0, 1)], taps(4), ids(14))
    found = []
    while (call := pending.take([state], context, max_tokens=2)) is not None:
        assert call[1].token_ids is not None
        assert call[1].next_ids is not None
        found += zip(call[1].token_ids.tolist(), call[1].next_ids.tolist(), strict=True)
        context.committed[0] += len(call[1].token_ids)
    assert found == [(11, 12), (12, 13), (13, 14), (14, 15)]


def test_the_target_may_use_its_buffer_again() -> None:
    pending, context, state, buffer = PendingTaps(), CacheLengths(num_rows=1, capacity=64), request(0), taps(1, 2)
    pending.keep([(state, 0, 2)], buffer, ids(1, 2))
    buffer[:] = np.nan
    found = pending.take([state], context, max_tokens=8)
    assert found is not None
    assert taken(found[1]) == [(0, 0, [1, 2])]


def test_calls_of_few_tokens_lose_nothing() -> None:
    pending, context = PendingTaps(), CacheLengths(num_rows=2, capacity=512)
    states = [request(0), request(1)]
    for begin in (0, 5):
        rows = [(states[0], 0, 3), (states[1], 3, 2)]
        pending.keep(rows, taps(*range(begin, begin + 5)), ids(*range(begin, begin + 5)))
    found: dict[int, list[float]] = {0: [], 1: []}
    while (call := pending.take(states, context, max_tokens=4)) is not None:
        assert 1 <= call[1].query_lengths.sum() <= 4
        for row, past, values in taken(call[1]):
            assert past == len(found[row]) == context.committed[row]
            found[row] += values
            context.committed[row] += len(values)
    assert found == {0: [0, 1, 2, 5, 6, 7], 1: [3, 4, 8, 9]}


def test_requests_that_are_dropped_leave_nothing_and_the_others_stay() -> None:
    pending, context = PendingTaps(), CacheLengths(num_rows=2, capacity=512)
    gone, stays = request(0), request(1)
    pending.keep([(gone, 0, 1), (stays, 1, 1)], taps(1, 2), ids(1, 2))
    pending.drop([gone])
    assert pending.num_positions(gone) == 0
    found = pending.take([gone, stays], context, max_tokens=8)
    assert found is not None
    assert taken(found[1]) == [(1, 0, [2])]


def test_only_who_has_more_than_may_wait_is_overdue() -> None:
    pending, late, early = PendingTaps(), request(0), request(1)
    values = taps(*range(2 * MAX_PENDING_POSITIONS + 1))
    kept = [(early, 0, MAX_PENDING_POSITIONS), (late, MAX_PENDING_POSITIONS, MAX_PENDING_POSITIONS + 1)]
    pending.keep(kept, values, np.arange(len(values)))
    assert pending.overdue() == [late]
