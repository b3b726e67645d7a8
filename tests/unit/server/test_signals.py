"""Signals that come while processes are ended or started: none interrupts that, and none is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from dspark_trt.server.signals import signals_deferred, signals_ignored

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """As `serve` has them: the first signal raises, those that follow are counted."""
    followed: list[int] = []

    def begin(number: int, frame: object) -> None:
        for ending in NUMBERS:
            signal.signal(ending, lambda number, frame: followed.append(number))
        raise KeyboardInterrupt

    before = [signal.signal(number, begin) for number in NUMBERS]
    yield followed
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def test_signal_within_the_block_counts_behind_it_and_a_second_one_too(handlers: list[int]) -> None:
    """A request to stop that came while a failed server was ended was lost, and `serve` went on."""
    done = []

    def end_processes() -> None:
        with signals_deferred():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        end_processes()
    assert done
    assert handlers == [signal.SIGINT]


def test_signal_that_is_ignored_around_the_block_stays_ignored(handlers: list[int]) -> None:
    with signals_ignored(), signals_deferred():
        signal.raise_signal(signal.SIGTERM)
    assert handlers == []


def test_without_a_signal_nothing_changes(handlers: list[int]) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with signals_deferred():
        pass
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_other_threads_have_no_handlers_to_change() -> None:
    ended = []

    def run() -> None:
        with signals_deferred():
            ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended
