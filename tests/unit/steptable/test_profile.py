"""Measuring a table: what is timed and how often, and what speaks against a result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.log import Progress
from dspark_trt.machine.load import Load
from dspark_trt.steptable import sweep as sweep_module
from dspark_trt.steptable.doubts import doubts_of, steadier
from dspark_trt.steptable.grid import context_grid, extra_grid, ingest_grid, padded_extra_grid, verification_batch
from dspark_trt.steptable.profile import measure_calls
from dspark_trt.steptable.sweep import (
    MORE_SWEEPS_S,
    NUM_SWEEPS,
    NUM_SWEEPS_IN_ANY_CASE,
    NUM_SWEEPS_OF_LONG_STEPS,
    Calls,
    Key,
    Timing,
    sweep,
    timings,
)

KEY: Key = ("step", 0, 1, 0)
QUIET = Load(0.0, 0.5)
STEADY = 0.02


class Clock:
    """A device that only does its work when it is waited for, on a clock of its own."""

    def __init__(self, milliseconds: list[float]) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self._milliseconds = iter(milliseconds)

    def call(self) -> None:
        self.calls.append("call")

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.now += next(self._milliseconds) / 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock([])
    monkeypatch.setattr(sweep_module.time, "perf_counter", lambda: clock.now)
    return clock


def with_times(clock: Clock, milliseconds: list[float]) -> Clock:
    clock._milliseconds = iter(milliseconds)
    return clock


def test_what_engines_only_enqueue_is_timed_until_it_is_done(clock: Clock) -> None:
    with_times(clock, [900.0, 900.0, 900.0, 4.0, *[5.0] * 7, 6.0])
    measured = sweep({KEY: clock.call}, lambda fraction: None, synchronize=clock.synchronize, num_warm_ups=3)
    assert measured[KEY].ms == pytest.approx(5.0)
    assert clock.calls == ["call", "synchronize"] * (3 + NUM_SWEEPS)


def test_a_burst_of_other_work_changes_no_difference_between_calls() -> None:
    quiet = {("step", 0, 1, extra): [20.0 + extra] * 9 for extra in range(6)}
    disturbed = quiet | {("step", 0, 1, 1): [21.0] * 4 + [60.0] * 5}
    assert {key: each.ms for key, each in timings(disturbed).items()} == {
        key: each.ms for key, each in timings(quiet).items()
    }


def test_prices_are_those_of_a_machine_as_busy_as_it_was() -> None:
    keys: list[Key] = [("step", 0, 1, extra) for extra in range(4)]
    busy = timings({key: [10.0, 10.0, 11.0, 11.0, 12.0] for key in keys})
    assert all(each.ms == pytest.approx(11.0) for each in busy.values())


def test_a_slow_machine_is_timed_in_fewer_rounds(clock: Clock) -> None:
    with_times(clock, [MORE_SWEEPS_S * 1e3 / 750] * 2000)  # a round takes a quarter of that time
    keys: list[Key] = [("step", 0, 1, extra) for extra in range(200)]
    sweep(dict.fromkeys(keys, clock.call), lambda fraction: None, synchronize=clock.synchronize, num_warm_ups=1)
    assert clock.calls.count("call") == 200 * (1 + NUM_SWEEPS_IN_ANY_CASE)


def test_no_round_times_its_calls_in_the_order_of_the_one_before(clock: Clock) -> None:
    order: list[int] = []
    keys: list[Key] = [("step", 0, 1, extra) for extra in range(12)]

    def call_of(extra: int) -> Callable[[], None]:
        def call() -> None:
            order.append(extra)
            clock.now += 0.001

        return call

    sweep({key: call_of(key[3]) for key in keys}, lambda fraction: None)
    rounds = [tuple(order[at : at + 12]) for at in range(0, len(order), 12)]
    assert rounds[0] == tuple(range(12))
    assert len(set(rounds)) == len(rounds) == 1 + NUM_SWEEPS


def test_steps_known_to_be_long_are_timed_fewer_times(clock: Clock) -> None:
    with_times(clock, [1.0, *[200.0] * 5])
    assert sweep({KEY: clock.call}, lambda fraction: None, synchronize=clock.synchronize)[KEY].ms == pytest.approx(200)
    assert clock.calls.count("call") == 1 + NUM_SWEEPS_OF_LONG_STEPS


def test_a_budget_leaves_out_rounds_and_then_what_a_table_can_do_without(clock: Clock) -> None:
    with_times(clock, [100.0] * 100)
    keys: list[Key] = [("step", 0, 1, extra) for extra in range(10)]
    options: dict[str, Any] = {"synchronize": clock.synchronize, "optional": set(keys[1:])}
    calls = dict.fromkeys(keys, clock.call)
    assert set(sweep(calls, lambda fraction: None, budget_s=3.05, **options)) == set(keys)
    assert clock.now == pytest.approx(3.0)  # a warm-up and two rounds instead of all
    clock.now = 0.0
    assert set(sweep(calls, lambda fraction: None, budget_s=0.95, **options)) == set(keys[:4])
    assert clock.now == pytest.approx(0.8)
    clock.now = 0.0
    assert set(sweep(calls, lambda fraction: None, budget_s=0.01, **options)) == {KEY}


def test_more_tokens_or_requests_measured_clearly_cheaper_are_a_doubt_about_the_whole_curve() -> None:
    rising: dict[Key, Timing] = {
        ("step", 128, count, extra): Timing(10.0 + count + extra, STEADY) for count in (1, 2) for extra in (0, 1, 3)
    }
    assert doubts_of(rising, QUIET, 1).sentences(QUIET, 6) == []
    falling = rising | {("step", 128, 2, 3): Timing(7.0, STEADY)}
    doubts = doubts_of(falling, QUIET, 1)
    assert doubts.suspects == {key for key in falling if key[2] == 2 or key[3] == 3}
    (sentence,) = doubts.sentences(QUIET, 6)
    assert "step of 2 requests with 3 extra tokens at 128 positions: 7.0 ms" in sentence
    assert doubts_of(rising | {("step", 128, 2, 3): Timing(12.5, STEADY)}, QUIET, 1).sentences(QUIET, 6) == []


def test_more_slots_of_a_draft_and_more_ingested_tokens_may_not_be_cheaper_either() -> None:
    for keys in ([("draft", 0, 1, 1), ("draft", 0, 1, 3)], [("ingest", 0, 0, 1), ("ingest", 0, 0, 16)]):
        assert doubts_of(dict(zip(keys, (Timing(5.0, 0), Timing(2.0, 0)), strict=True)), QUIET, 1).falls  # type: ignore[arg-type]


def test_repeats_that_differ_and_other_work_are_a_busy_machine() -> None:
    times: dict[Key, Timing] = {("step", 0, 1, extra): Timing(10.0 + extra, STEADY) for extra in range(10)}
    one_odd = times | {KEY: Timing(10.0, 0.6)}
    doubts = doubts_of(one_odd, QUIET, 1)
    assert (doubts.is_busy, doubts.suspects) == (True, {KEY})  # one of ten
    assert "load average 0.5" in doubts.sentences(QUIET, 10)[0]
    busy = Load(1000.0, 1000.0)
    assert doubts_of(times, busy, 1).suspects == set(times)
    small = {key: Timing(each.ms / 1000, 0.6) for key, each in times.items()}
    assert not doubts_of(small, QUIET, 1).is_busy, "hundredths of a millisecond price nothing"


def test_of_two_measurements_the_one_that_was_disturbed_less_counts() -> None:
    other: Key = ("step", 0, 1, 1)
    first = {KEY: Timing(9.0, 0.5), other: Timing(5.0, 0.0)}
    assert steadier(first, {KEY: Timing(6.0, 0.0)}) == {KEY: Timing(6.0, 0.0), other: Timing(5.0, 0.0)}
    assert steadier(first, {KEY: Timing(11.0, 0.0)})[KEY].ms == 9.0


@pytest.mark.parametrize("is_quiet_later", [True, False])
def test_a_doubtful_table_is_measured_again_once_then_said_and_recorded(
    is_quiet_later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three sizes the middle one falls; its curve alone is timed again."""
    keys: list[Key] = [("step", 0, 1, 0), ("step", 0, 1, 1), ("draft", 0, 4, 2)]
    falling, rising = [20.0, 10.0, 5.0], [9.0, 10.0, 5.0]
    rounds = iter([falling, rising if is_quiet_later else falling])
    timed: list[list[Key]] = []

    def time_all(chosen: Calls, budget_s: float, progress: Progress) -> dict[Key, Timing]:
        timed.append(list(chosen))
        times = dict(zip(keys, next(rounds), strict=True))
        return {key: Timing(times[key], STEADY) for key in chosen}

    calls = dict.fromkeys(keys, lambda: None)
    with caplog.at_level(logging.WARNING, "dspark_trt"):
        measured, remarks = measure_calls(calls, time_all, 10_000, 60.0, lambda fraction: None)
    assert timed == [keys, keys[:2]]
    assert (remarks["num_calls_measured_again"], remarks["num_calls_left_out"]) == (2, 0)
    assert measured[KEY].ms == (9.0 if is_quiet_later else 20.0)
    assert bool(remarks["doubts"]) == (not is_quiet_later)
    assert len(caplog.records) == (0 if is_quiet_later else 1)
    if not is_quiet_later:
        assert "step of 1 requests with 1 extra tokens" in caplog.text
        assert "dspark-trt profile DIR" in caplog.text


@pytest.mark.parametrize("max_requests", [1, 4])
@pytest.mark.parametrize("gamma", [1, 5, 13])
def test_no_timed_call_is_larger_than_the_smallest_rows_that_a_build_accepts(max_requests: int, gamma: int) -> None:
    limits = EngineLimits(max_requests, max_seq_len=gamma + 3, max_batch_tokens=512)
    for depth in context_grid(limits, gamma):
        assert 0 < depth < limits.max_seq_len - gamma
        sizes = [(max_requests, tokens) for tokens in ingest_grid(gamma, limits)]
        sizes += [(1, 1 + extra) for grid in (extra_grid, padded_extra_grid) for extra in grid(1, gamma, limits)]
        for num_requests, tokens in sizes:
            batch = verification_batch(min(num_requests, tokens), tokens, gamma, depth, max_requests)
            assert int((batch.past_lengths + batch.query_lengths).max()) <= limits.max_seq_len
