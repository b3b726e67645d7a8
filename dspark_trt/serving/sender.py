"""Sends what the decoding loop made, in its order, so that the loop never waits for a client."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from dspark_trt.serving.failures import describe_failure


class Sender:
    """`run` is a thread's; `put` and `close` are called from others and return at once."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def put(self, task: Callable[[], None]) -> None:
        """A task that fails is logged, and the next one goes on."""
        self._tasks.put(task)

    def close(self) -> None:
        """End `run` when everything that was put has been sent."""
        self._tasks.put(None)

    def run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:
                describe_failure("a client could not be answered", error)
