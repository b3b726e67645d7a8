"""Two threads behind the engine model: one owns the decoding loop, one sends what it made.

    execute()  --submit, stop-->  inbox  -->  loop thread  --emissions-->  outbox  -->  sender thread  -->  clients

The loop thread never waits for a client, and tensors are made while the engines already work on the next step. A
failure that the loop itself does not handle ends the requests of that loop; a new loop over the same engines goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from numpy.typing import NDArray

from dspark_trt.errors import RequestError
from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.serving.adapter import EngineRequest, ResponseWriter, StopCommand
from dspark_trt.serving.failures import Failure, describe_failure

_CANCEL_POLL_STEPS = 4  # asking Triton costs up to 0.15 ms a request
_JOIN_TIMEOUT_S = 30.0


class Reply(Protocol):
    """The way back to one client. Exactly one call is the last: a send with is_last, or a fail."""

    def send(self, tensors: Mapping[str, NDArray[Any]], *, is_last: bool) -> None: ...

    def fail(self, failure: Failure, message: str) -> None: ...

    def is_cancelled(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request on its way through the worker."""

    request: EngineRequest
    writer: ResponseWriter
    reply: Reply

    @property
    def request_id(self) -> str:
        return self.request.generation.request_id


class _Close:
    """The last command of the inbox and of the outbox."""


class Worker:
    """Runs decoding loops until `close`. `submit` and `stop` return at once and may be called from any thread."""

    def __init__(self, make_loop: Callable[[], DecodingLoop], after_step: Callable[[DecodingLoop], None]) -> None:
        """`after_step` is called from the loop thread, with the loop that made a step. Raises as `make_loop` does."""
        self._make_loop = make_loop
        self._loop = make_loop()  # from here on the loop thread's own, like the tickets
        self._after_step = after_step
        self._inbox: SimpleQueue[Ticket | StopCommand | _Close] = SimpleQueue()
        self._outbox: SimpleQueue[Callable[[], None] | _Close] = SimpleQueue()
        self._tickets: dict[str, Ticket] = {}  # by request id, until the last response
        self._threads = (
            Thread(target=self._decode, name="decoding-loop", daemon=True),
            Thread(target=self._send, name="response-sender", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    def submit(self, ticket: Ticket) -> None:
        self._inbox.put(ticket)

    def stop(self, command: StopCommand) -> None:
        """End the requests that the command names with CANCELLED, if there are any."""
        self._inbox.put(command)

    def close(self) -> None:
        """End all requests with UNAVAILABLE, send what is left to send, end both threads."""
        self._inbox.put(_Close())
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)

    def _decode(self) -> None:
        while self._take_commands(self._loop):
            try:
                self._step(self._loop)
            except Exception as error:
                self._fail_all(Failure.INTERNAL, describe_failure("the decoding loop failed", error))
                self._loop = self._make_loop()
        self._fail_all(Failure.UNAVAILABLE, "the server is stopping")
        self._outbox.put(_Close())

    def _step(self, loop: DecodingLoop) -> None:
        emissions = loop.step()
        self._after_step(loop)  # first: whoever has an answer finds it in the metrics
        for emission in emissions:
            self._deliver(emission)
        if loop.totals.num_steps % _CANCEL_POLL_STEPS == 0:
            for ticket in self._tickets.values():
                if ticket.reply.is_cancelled():
                    loop.cancel(ticket.request_id)

    def _take_commands(self, loop: DecodingLoop) -> bool:
        """Obey every command that has come; wait for one while there is no work. False: close."""
        while not loop.has_work or not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Close):
                return False
            if isinstance(command, StopCommand):
                self._cancel(command, loop)
            else:
                self._admit(command, loop)
        return True

    def _admit(self, ticket: Ticket, loop: DecodingLoop) -> None:
        try:
            loop.submit(ticket.request.generation)
        except RequestError as error:
            self._fail(ticket, Failure.INVALID_ARG, str(error))
        except Exception as error:
            self._fail(ticket, Failure.INTERNAL, describe_failure("a request could not be queued", error))
        else:
            self._tickets[ticket.request_id] = ticket

    def _cancel(self, command: StopCommand, loop: DecodingLoop) -> None:
        for ticket in self._tickets.values():
            by_handle = command.handle is not None and command.handle == ticket.request.handle
            by_client_id = command.handle is None and command.client_id == ticket.request.client_id
            if by_handle or by_client_id:
                loop.cancel(ticket.request_id)

    def _deliver(self, emission: Emission) -> None:
        ticket = self._tickets[emission.request_id]
        if emission.finish_reason is not None:
            del self._tickets[emission.request_id]
        if emission.finish_reason == "cancelled":
            self._fail(ticket, Failure.CANCELLED, "the request was cancelled")
        elif emission.finish_reason == "error":
            self._fail(ticket, Failure.INTERNAL, emission.error or "the request failed")
        else:
            self._outbox.put(lambda: _respond(ticket, emission))

    def _fail(self, ticket: Ticket, failure: Failure, message: str) -> None:
        self._outbox.put(lambda: ticket.reply.fail(failure, message))

    def _fail_all(self, failure: Failure, message: str) -> None:
        for ticket in self._tickets.values():
            self._fail(ticket, failure, message)
        self._tickets.clear()

    def _send(self) -> None:
        while not isinstance(task := self._outbox.get(), _Close):
            try:
                task()
            except Exception as error:  # the client may be gone
                describe_failure("a response could not be sent", error)


def _respond(ticket: Ticket, emission: Emission) -> None:
    tensors = ticket.writer.write(emission)
    if tensors is not None:
        ticket.reply.send(tensors, is_last=emission.finish_reason is not None)
