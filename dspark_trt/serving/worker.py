"""Three threads behind the engine model: one owns the decoding loop, one sends what it made, one asks after clients.

    execute()  --submit, stop-->  inbox  -->  loop thread  --emissions-->  outbox  -->  sender thread  -->  clients
                                    ^---- stop: the client is gone ----  watcher thread

The loop thread never waits for a client. What a failure ends, and why: docs/architecture.md, "What a failure ends".
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread

from dspark_trt.errors import RequestError
from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.serving.adapter import StopCommand
from dspark_trt.serving.admission import AdmissionQueue
from dspark_trt.serving.failures import Failure, describe_failure
from dspark_trt.serving.limits import AdmissionLimits
from dspark_trt.serving.observer import Observer
from dspark_trt.serving.sender import Sender
from dspark_trt.serving.ticket import Ticket
from dspark_trt.serving.watcher import Watcher

logger = logging.getLogger(__name__)

STOPPING = "the server is stopping; send the request to another one, or again later"
_JOIN_TIMEOUT_S = 30.0
_LAST_WORDS_S = 2.0  # for the sender to tell every client of a fatal failure
_EXPIRY_CHECK_S = 0.05
_NEVER = float("inf")


class _Close:
    """The last command of the inbox."""


class Worker:
    """Runs decoding loops until `close`. Methods may be called from any thread; all but `close` return at once."""

    def __init__(
        self,
        make_loop: Callable[[], DecodingLoop],
        *,
        max_requests: int,
        limits: AdmissionLimits,
        observer: Observer,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        """`end_process` is called with an exit code after a failure that no loop survives. Raises as `make_loop`."""
        self._make_loop = make_loop
        self._loop = make_loop()  # from here on the loop thread's own, like the tickets
        self._max_requests = max_requests
        self._observer = observer
        self._end_process = end_process
        self._inbox: SimpleQueue[Ticket | StopCommand | _Close] = SimpleQueue()
        self._sender = Sender()
        self._running: dict[str, Ticket] = {}  # by request id, those that the loop has
        self._waiting = AdmissionQueue(limits, max_requests=max_requests, now=time.monotonic)
        self._drain_at = _NEVER
        self._next_expiry_check = 0.0
        self._last_words = Event()
        self._watcher = Watcher(self._sender.put, self._inbox.put)
        work = {"decoding-loop": self._decode, "response-sender": self._sender.run, "client-watcher": self._watcher.run}
        self._threads = [
            Thread(target=self._guarded, args=(run,), name=name, daemon=True) for name, run in work.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_draining(self) -> bool:
        return self._drain_at < _NEVER

    @property
    def num_open(self) -> int:
        """Requests that are not ended."""
        return len(self._running) + len(self._waiting)

    def submit(self, ticket: Ticket) -> None:
        self._inbox.put(ticket)

    def stop(self, command: StopCommand) -> None:
        """End the request that the command names with CANCELLED, if there is one; see `_stop`."""
        self._inbox.put(command)

    def drain(self, seconds: float) -> None:
        """Refuse what comes from now on; what still runs after `seconds` ends with UNAVAILABLE."""
        self._drain_at = time.monotonic() + seconds

    def close(self) -> None:
        """End all requests with UNAVAILABLE, send what is left to send, end the threads."""
        self._inbox.put(_Close())
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)

    def _guarded(self, run: Callable[[], None]) -> None:
        """A thread that dies takes the process with it, after every client was told."""
        try:
            run()
        except BaseException as error:
            message = describe_failure("a thread of the engine model died; this process ends", error)
            self._fail_all(Failure.INTERNAL, message)
            self._sender.put(self._last_words.set)
            self._last_words.wait(_LAST_WORDS_S)
            self._end_process(70)
            self._watcher.close()
            self._sender.close()

    def _decode(self) -> None:
        while self._take_commands():
            try:
                self._step()
            except Exception as error:
                self._fail_all(Failure.INTERNAL, describe_failure("the decoding loop failed", error))
                self._loop = self._make_loop()
        self._fail_all(Failure.UNAVAILABLE, STOPPING)
        self._watcher.close()
        self._sender.close()

    def _step(self) -> None:
        emissions = self._loop.step()
        now = time.monotonic()
        has_ended = any(emission.finish_reason for emission in emissions)
        self._observer.after_step(self._loop, len(self._waiting), has_ended)  # first: who has an answer finds it there
        for emission in emissions:
            self._deliver(emission, now)
        self._expire(now)
        self._admit()
        self._watcher.look(self._running, self._waiting)

    def _take_commands(self) -> bool:
        """Obey every command that has come; wait for one while there is no work. False: close."""
        while not self._loop.has_work or not self._inbox.empty():
            command = self._inbox.get()  # whatever waits for a row waits for a loop that has work
            if isinstance(command, _Close):
                return False
            if isinstance(command, StopCommand):
                self._stop(command)
            else:
                self._accept(command)
        return True

    def _accept(self, ticket: Ticket) -> None:
        """Let a request wait for a row, or answer a probe: that this thread reads its inbox is what it asks."""
        if ticket.request.is_probe:
            self._respond(ticket, Emission(request_id=ticket.request_id, finish_reason="stop"))
            return
        refused = self._waiting.offer(ticket)
        if refused is not None:
            self._end(refused)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_requests:
            self._submit(self._waiting.pop())

    def _submit(self, ticket: Ticket) -> None:
        try:
            self._loop.submit(ticket.request.generation_request)
        except RequestError as error:
            ticket.end_with(Failure.INVALID_ARG, str(error))
            self._end(ticket)
        except Exception as error:
            ticket.end_with(Failure.INTERNAL, describe_failure(f"{ticket} could not be queued", error))
            self._end(ticket)
        else:
            self._running[ticket.request_id] = ticket
            self._observer.admitted(ticket, time.monotonic())

    def _stop(self, command: StopCommand) -> None:
        """An id is the client's own: where several requests have it, none of them is surely meant."""
        tickets = [*self._running.values(), *self._waiting]
        found = [ticket for ticket in tickets if command.names(ticket.request)]
        if len(found) > 1:
            refusal = f"stop: {len(found)} requests have this request id, and none was ended; send a stop_handle"
            self._sender.put(lambda: command.answer(refusal))
            return
        for ticket in found:
            self._cancel(ticket, Failure.CANCELLED, "the request was cancelled")
        self._sender.put(lambda: command.answer(None))

    def _cancel(self, ticket: Ticket, failure: Failure, message: str) -> None:
        """End a request at once where it waits, else with the loop's next step."""
        ticket.end_with(failure, message)
        if self._waiting.remove(ticket):
            self._end(ticket)
        else:
            self._loop.cancel(ticket.request_id)

    def _expire(self, now: float) -> None:
        """End what has no time left. A few times a second suffice."""
        if now >= self._drain_at and self.num_open:
            for ticket in [*self._waiting, *self._running.values()]:
                self._cancel(ticket, Failure.UNAVAILABLE, STOPPING)
        if now < self._next_expiry_check:
            return
        self._next_expiry_check = now + _EXPIRY_CHECK_S
        for ticket in self._waiting.take_expired():
            self._end(ticket)
        for ticket in self._running.values():
            if now >= ticket.ends_at:
                self._cancel(ticket, *ticket.timed_out())

    def _deliver(self, emission: Emission, now: float) -> None:
        ticket = self._running[emission.request_id]
        if emission.token_ids:
            ticket.note_tokens(len(emission.token_ids), now)
        if emission.finish_reason is not None:
            del self._running[emission.request_id]
        if emission.finish_reason == "cancelled":
            ticket.end_with(Failure.CANCELLED, "the request was cancelled")
            self._end(ticket, emission)
        elif emission.finish_reason == "error":
            ticket.end_with(Failure.INTERNAL, emission.error or "the request failed")
            self._end(ticket, emission)
        else:
            if emission.finish_reason is not None:
                self._observer.ended(ticket, emission, now)
                logger.info("%s ended: %s, %d tokens", ticket, emission.finish_reason, ticket.num_tokens)
            self._respond(ticket, emission)

    def _respond(self, ticket: Ticket, emission: Emission) -> None:
        def respond() -> None:
            if not ticket.respond(emission, time.monotonic()):
                self._inbox.put(StopCommand(ticket.request.handle, ""))

        self._sender.put(respond)

    def _end(self, ticket: Ticket, emission: Emission | None = None) -> None:
        """Tell a client why its request has no (further) answer."""
        failure, message = ticket.ending or (Failure.INTERNAL, "the request failed")
        self._observer.ended(ticket, emission, time.monotonic())
        logger.info("%s ended: %s, %d tokens, %s", ticket, failure.name, ticket.num_tokens, message)
        self._sender.put(lambda: ticket.fail(failure, message))

    def _fail_all(self, failure: Failure, message: str) -> None:
        tickets = [*self._running.values(), *self._waiting]
        for ticket in tickets:
            self._waiting.remove(ticket)
            ticket.end_with(failure, message)
            self._end(ticket)
        self._running.clear()
