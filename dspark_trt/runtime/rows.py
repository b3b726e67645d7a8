"""Which request lives in which KV row.

Rows 0 .. num_occupied - 1 are occupied, the others free, always: a departure moves the last occupied row into the hole,
so that idle rows cost nothing and at most one row moves per departure.

Every occupant gets a generation, a number that is never given again. Data that others keep per row (the scheduler's
confidences of earlier steps) carries it, so that a row's new occupant never inherits its predecessor's data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Occupant(Protocol):
    """What a row can hold. Both numbers are written by its own methods."""

    @property
    def row(self) -> int: ...

    @property
    def generation(self) -> int: ...

    def occupy(self, row: int, generation: int) -> None: ...

    def move_to(self, row: int) -> None: ...


OccupantT = TypeVar("OccupantT", bound=Occupant)

NO_ROW = -1


@dataclass(frozen=True, slots=True)
class RowMove(Generic[OccupantT]):
    """The live positions of `source` have to be copied to `destination`; `occupant` lives there from now on."""

    source: int
    destination: int
    occupant: OccupantT


class Rows(Generic[OccupantT]):
    """Occupants of the KV rows; `occupants[row]` is the one of that row."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.occupants: list[OccupantT] = []
        self._next_generation = 0

    @property
    def num_free(self) -> int:
        return self.num_rows - len(self.occupants)

    def occupy(self, occupant: OccupantT) -> None:
        """Give `occupant` the first free row and a fresh generation."""
        assert self.num_free > 0, "no free row: admission must ask num_free first"
        occupant.occupy(len(self.occupants), self._next_generation)
        self._next_generation += 1
        self.occupants.append(occupant)

    def release(self, occupant: OccupantT) -> RowMove[OccupantT] | None:
        """Free the row of `occupant`. The caller carries out the move, if one is returned."""
        hole = occupant.row
        assert self.occupants[hole] is occupant, f"row {hole} belongs to another request"
        occupant.move_to(NO_ROW)
        last = self.occupants.pop()
        if last is occupant:
            return None
        move = RowMove(source=len(self.occupants), destination=hole, occupant=last)
        self.occupants[hole] = last
        last.move_to(hole)
        return move

    def check_integrity(self) -> None:
        assert len(self.occupants) <= self.num_rows, "more requests than rows"
        for row, occupant in enumerate(self.occupants):
            assert occupant.row == row, f"the request in row {row} believes to live in row {occupant.row}"
        generations = {occupant.generation for occupant in self.occupants}
        assert len(generations) == len(self.occupants), "two requests share a generation"
