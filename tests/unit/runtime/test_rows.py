"""KV rows stay dense: a departure moves at most one row, and no occupant inherits data of another."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dspark_trt.runtime.rows import NO_ROW, Rows


@dataclass
class Occupant:
    row: int = NO_ROW
    generation: int = -1

    def occupy(self, row: int, generation: int) -> None:
        self.row, self.generation = row, generation

    def move_to(self, row: int) -> None:
        self.row = row


def occupied(count: int, num_rows: int = 4) -> tuple[Rows[Occupant], list[Occupant]]:
    rows: Rows[Occupant] = Rows(num_rows)
    occupants = [Occupant() for _ in range(count)]
    for occupant in occupants:
        rows.occupy(occupant)
    return rows, occupants


def test_rows_are_given_from_the_first_on() -> None:
    rows, occupants = occupied(3)
    assert [occupant.row for occupant in occupants] == [0, 1, 2]
    assert rows.num_free == 1


def test_the_last_row_moves_into_a_hole() -> None:
    rows, (first, middle, last) = occupied(3)
    move = rows.release(middle)
    assert move is not None
    assert (move.source, move.destination, move.occupant) == (2, 1, last)
    assert (first.row, last.row, middle.row) == (0, 1, NO_ROW)
    rows.check_integrity()


def test_the_last_row_leaves_without_a_move() -> None:
    rows, (_, last) = occupied(2)
    assert rows.release(last) is None
    rows.check_integrity()


def test_a_generation_is_never_given_again() -> None:
    rows, occupants = occupied(2)
    seen = {occupant.generation for occupant in occupants}
    for _ in range(10):
        rows.release(rows.occupants[0])
        newcomer = Occupant()
        rows.occupy(newcomer)
        assert newcomer.generation not in seen
        seen.add(newcomer.generation)
        rows.check_integrity()


def test_a_full_batch_takes_nobody() -> None:
    rows, _ = occupied(2, num_rows=2)
    with pytest.raises(AssertionError, match="no free row"):
        rows.occupy(Occupant())


def test_releasing_twice_is_a_programming_error() -> None:
    rows, (first, _) = occupied(2)
    rows.release(first)
    with pytest.raises((AssertionError, IndexError)):
        rows.release(first)
