"""Who is told what the worker does, for the metrics."""

from __future__ import annotations

from typing import Protocol

from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.serving.ticket import Ticket


class Observer(Protocol):
    """Called from the loop thread."""

    def after_step(self, loop: DecodingLoop, num_waiting: int, has_ended: bool) -> None:
        """`has_ended`: a request did with this step."""
        ...

    def admitted(self, ticket: Ticket, now: float) -> None:
        """A request has a row. `now`: seconds of the monotonic clock."""
        ...

    def ended(self, ticket: Ticket, emission: Emission | None, now: float) -> None:
        """`emission` is the last one of a request that had a row."""
        ...
