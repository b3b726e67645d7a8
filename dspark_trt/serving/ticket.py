"""One request on its way through the worker, and the way back to its client."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from dspark_trt.runtime.emission import Emission
from dspark_trt.serving.adapter import EngineRequest
from dspark_trt.serving.failures import Failure, describe_failure
from dspark_trt.serving.postprocess import ping
from dspark_trt.serving.responses import ResponseWriter

logger = logging.getLogger(__name__)


class Reply(Protocol):
    """The way back to one client. Exactly one call is the last: a send with is_last, or a fail."""

    def send(self, tensors: Mapping[str, NDArray[Any]], *, is_last: bool) -> None: ...

    def fail(self, failure: Failure, message: str) -> None: ...

    def is_cancelled(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """`ending` and the times of tokens are the loop thread's, `is_closed` and `sent_at` the sender thread's own."""

    request: EngineRequest
    writer: ResponseWriter
    reply: Reply
    arrived_at: float  # seconds of the monotonic clock, as the following
    ends_at: float
    ending: tuple[Failure, str] | None = None  # why it ends, where no token ends it
    first_token_at: float | None = None
    last_token_at: float = 0.0
    longest_gap_s: float = 0.0
    num_tokens: int = 0
    is_closed: bool = False
    sent_at: float = 0.0

    @property
    def request_id(self) -> str:
        return self.request.generation_request.request_id

    def end_with(self, failure: Failure, message: str) -> None:
        """Say why the request ends; the first reason counts."""
        if self.ending is None:
            self.ending = (failure, message)

    def timed_out(self) -> tuple[Failure, str]:
        seconds = self.ends_at - self.arrived_at
        return Failure.TIMEOUT, f"timeout_ms: the request did not end within {seconds * 1e3:.0f} ms and was stopped"

    def note_tokens(self, num_tokens: int, now: float) -> None:
        """Tokens were made for the request."""
        self.num_tokens += num_tokens
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_token_at)
        self.last_token_at = now

    # The sender thread's part

    def respond(self, emission: Emission, now: float) -> bool:
        """Send what the loop made. False when the client cannot be reached: then it has an error, or is gone."""
        if self.is_closed:
            return True
        try:
            tensors = self.writer.write(emission)
            if tensors is not None:
                self.reply.send(tensors, is_last=emission.finish_reason is not None)
                self.sent_at = now
            self.is_closed = emission.finish_reason is not None
        except BaseException as error:
            # a token that is lost without a word would be worse than an end
            self.fail(Failure.INTERNAL, describe_failure(f"a response of {self} could not be sent", error))
            return False
        return True

    def fail(self, failure: Failure, message: str) -> None:
        """The last response, unless there was one."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self.reply.fail(failure, message)
        except BaseException as error:  # nothing more can be done for it
            describe_failure(f"the end of {self} could not be told to its client", error)

    def ping(self, now: float) -> bool:
        """See `dspark_trt.serving.postprocess.ping`. False as for `respond`."""
        if self.is_closed:
            return True
        self.sent_at = now
        try:
            self.reply.send(ping(self.request.handle), is_last=False)
        except BaseException as error:
            self.fail(Failure.INTERNAL, describe_failure(f"{self} could not be pinged", error))
            return False
        return True

    def __str__(self) -> str:
        """For the log."""
        client_id = f", client's id {self.request.client_id!r}" if self.request.client_id else ""
        return f"request {self.request_id}{client_id}"
