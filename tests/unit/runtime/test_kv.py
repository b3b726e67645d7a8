"""Cache lengths: reserve before a call, commit what was accepted, give up the rest."""

from __future__ import annotations

import pytest

from dspark_trt.errors import CapacityError
from dspark_trt.runtime.kv import CacheLengths


def test_a_rejection_commits_less_than_was_reserved() -> None:
    cache = CacheLengths(num_rows=2, capacity=10)
    cache.reserve(1, 8)
    cache.commit(1, 3)
    assert cache.committed.tolist() == [0, 3]
    cache.check_integrity(num_occupied=2)


def test_a_failed_call_leaves_the_length_as_it_was() -> None:
    cache = CacheLengths(num_rows=1, capacity=10)
    cache.reserve(0, 4)
    cache.commit(0, 0)
    cache.reserve(0, 10)
    cache.commit(0, 10)
    assert cache.committed.tolist() == [10]


def test_more_than_the_row_holds_is_a_capacity_error_that_changes_nothing() -> None:
    cache = CacheLengths(num_rows=1, capacity=4)
    cache.reserve(0, 3)
    cache.commit(0, 3)
    with pytest.raises(CapacityError, match="row 0: 5 positions are needed, it holds 4"):
        cache.reserve(0, 2)
    cache.check_integrity(num_occupied=1)


def test_committing_more_than_was_reserved_is_a_programming_error() -> None:
    cache = CacheLengths(num_rows=1, capacity=4)
    cache.reserve(0, 2)
    with pytest.raises(AssertionError, match="more is committed"):
        cache.commit(0, 3)


def test_two_calls_in_flight_for_one_row_are_a_programming_error() -> None:
    cache = CacheLengths(num_rows=1, capacity=4)
    cache.reserve(0, 2)
    with pytest.raises(AssertionError, match="in flight"):
        cache.reserve(0, 1)
    with pytest.raises(AssertionError, match="kept a reservation"):
        cache.check_integrity(num_occupied=1)


def test_a_moved_row_takes_its_length_and_leaves_none() -> None:
    cache = CacheLengths(num_rows=3, capacity=4)
    cache.reserve(2, 4)
    cache.commit(2, 4)
    cache.move(2, 0)
    assert cache.committed.tolist() == [4, 0, 0]
    cache.check_integrity(num_occupied=1)
