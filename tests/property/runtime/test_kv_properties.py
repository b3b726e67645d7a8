"""Cache lengths and slots under arbitrary sequences of joins, calls, rejections, failures and departures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark_trt.errors import CapacityError
from dspark_trt.runtime.kv import CacheLengths
from dspark_trt.runtime.rows import NO_ROW, Rows

NUM_ROWS, CAPACITY = 4, 12


class Sequence:
    """The model of one request: the tokens that its row must hold."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.row = NO_ROW
        self.generation = -1
        self.tokens: list[int] = []

    def occupy(self, row: int, generation: int) -> None:
        self.row, self.generation = row, generation

    def move_to(self, row: int) -> None:
        self.row = row


class CacheMachine(RuleBasedStateMachine):
    """A memory of ints is written and moved as an engine would, guided by CacheLengths and Rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = CacheLengths(num_rows=NUM_ROWS, capacity=CAPACITY)
        self.rows: Rows[Sequence] = Rows(NUM_ROWS)
        self.memory = np.zeros((NUM_ROWS, CAPACITY), dtype=np.int64)
        self.num_moves = self.num_departures = self.counter = 0

    @precondition(lambda self: self.rows.num_free > 0)
    @rule()
    def join(self) -> None:
        self.rows.occupy(Sequence(self.counter))
        self.counter += 1

    @precondition(lambda self: self.rows.occupants)
    @rule(data=st.data(), length=st.integers(1, 6))
    def call(self, data: Any, length: int) -> None:
        sequence = data.draw(st.sampled_from(self.rows.occupants))
        row, past = sequence.row, len(sequence.tokens)
        if past + length > CAPACITY:
            with pytest.raises(CapacityError):
                self.cache.reserve(row, length)
            return
        self.cache.reserve(row, length)
        written = [1000 * sequence.name + self.counter + offset for offset in range(length)]
        self.counter += length
        first = int(self.cache.committed[row])
        self.memory[row, first : first + length] = written
        num_accepted = data.draw(st.integers(0, length))
        if num_accepted:
            self.cache.commit(row, num_accepted)
        else:
            self.cache.commit(row, 0)
        sequence.tokens += written[:num_accepted]

    @precondition(lambda self: self.rows.occupants)
    @rule(data=st.data())
    def depart(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.rows.occupants))
        self.cache.clear(sequence.row)
        move = self.rows.release(sequence)
        self.num_departures += 1
        if move is not None:
            self.num_moves += 1
            live = int(self.cache.committed[move.source])
            self.memory[move.destination] = -1  # a move copies live positions, nothing else
            self.memory[move.destination, :live] = self.memory[move.source, :live]
            self.cache.move(move.source, move.destination)

    @invariant()
    def every_row_holds_the_tokens_of_its_request(self) -> None:
        self.rows.check_integrity()
        self.cache.check_integrity(len(self.rows.occupants))
        for sequence in self.rows.occupants:
            length = int(self.cache.committed[sequence.row])
            assert self.memory[sequence.row, :length].tolist() == sequence.tokens
        assert self.num_moves <= self.num_departures


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)
