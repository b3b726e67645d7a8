"""The worker: clients of every kind around one loop, none of which can stop it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import Any

import numpy as np
import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.packaging.signature import ENGINE_OUTPUTS
from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.serving.adapter import EngineRequest, StopCommand
from dspark_trt.serving.failures import Failure
from dspark_trt.serving.limits import AdmissionLimits, retry_after_s
from dspark_trt.serving.responses import ResponseWriter
from dspark_trt.serving.ticket import Ticket
from dspark_trt.serving.worker import Worker
from tests.support.toy_engines import ToyDrafter, ToyLanguage, ToyTarget, letters, make_loop, run

LANGUAGE = ToyLanguage(vocab_size=23)
LIMITS = EngineLimits(max_requests=4, max_seq_len=4096, max_batch_tokens=64)
LONG = 4000  # tokens: a request that does not end by itself within a test
WAIT_S = 60.0


@dataclass
class Client:
    """Keeps what it is sent; may refuse, wait, or walk away."""

    answers: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    has_left: bool = False
    may_read: Event | None = None
    send_error: Exception | None = None

    def send(self, tensors: Mapping[str, np.ndarray], *, is_last: bool) -> None:
        if self.may_read is not None:
            self.may_read.wait(WAIT_S)
        if self.send_error is not None:
            raise self.send_error
        self.answers.put((tensors, is_last))

    def fail(self, failure: Failure, message: str) -> None:
        self.answers.put((failure, message))

    def is_cancelled(self) -> bool:
        return self.has_left

    def next(self) -> Any:
        return self.answers.get(timeout=WAIT_S)

    def read_all(self) -> list[int]:
        """Token ids up to the last response."""
        token_ids: list[int] = []
        while True:
            tensors, is_last = self.next()
            token_ids += tensors["output_ids"].ravel().tolist()
            if is_last:
                assert self.answers.empty(), "nothing comes after the last response"
                return token_ids

    def read_failure(self) -> tuple[Failure, str]:
        """The failure that ends the request, responses before it skipped."""
        while True:
            first, second = self.next()
            if isinstance(first, Failure):
                assert self.answers.empty(), "nothing comes after a failure"
                return first, second


OUTPUTS = [tensor.name for tensor in ENGINE_OUTPUTS]


def request(
    handle: int, num_tokens: int, *, is_streaming: bool = True, client_id: str = "", **more: Any
) -> EngineRequest:
    generation = GenerationRequest(
        request_id=str(handle), prompt_ids=(1, 2, handle % 23), sampling=SamplingParams(max_tokens=num_tokens)
    )
    return EngineRequest(generation, handle, client_id, is_streaming, echoes_prompt=False, **more)


def ticket(engine_request: EngineRequest, client: Client) -> Ticket:
    now = time.monotonic()
    writer = ResponseWriter(engine_request, letters, OUTPUTS)
    return Ticket(engine_request, writer, client, arrived_at=now, ends_at=now + (engine_request.timeout_s or 600.0))


@dataclass
class Setting:
    """A worker over toy engines, and the way to reach into them."""

    target: ToyTarget = field(default_factory=lambda: ToyTarget(LANGUAGE, LIMITS))
    drafter: ToyDrafter = field(default_factory=lambda: ToyDrafter(LANGUAGE, LIMITS))
    before_step: Callable[[], None] = lambda: None
    loops: list[DecodingLoop] = field(default_factory=list)
    steps: SimpleQueue[int] = field(default_factory=SimpleQueue)
    exit_codes: SimpleQueue[int] = field(default_factory=SimpleQueue)
    admitted_ids: list[str] = field(default_factory=list)

    def after_step(self, loop: DecodingLoop, num_waiting: int, has_ended: bool) -> None:
        self.steps.put(loop.num_running)

    def admitted(self, ticket: Ticket, now: float) -> None:
        self.admitted_ids.append(ticket.request_id)

    def ended(self, ticket: Ticket, emission: Emission | None, now: float) -> None: ...

    def make_worker(self, **limits: Any) -> Worker:
        return Worker(
            self.make_loop,
            max_requests=LIMITS.max_requests,
            limits=AdmissionLimits(**limits),
            observer=self,
            end_process=self.exit_codes.put,
        )

    def make_loop(self) -> DecodingLoop:
        loop = make_loop(self.target, self.drafter, SchedulerConfig("fixed"))
        step = loop.step

        def observed_step() -> Any:
            self.before_step()
            return step()

        loop.step = observed_step  # type: ignore[method-assign]
        self.loops.append(loop)
        return loop


@pytest.fixture
def setting() -> Setting:
    return Setting()


@pytest.fixture
def worker(setting: Setting) -> Iterator[Worker]:
    worker = setting.make_worker()
    yield worker
    worker.close()


def submit(worker: Worker, engine_request: EngineRequest, **options: Any) -> Client:
    client = Client(**options)
    worker.submit(ticket(engine_request, client))
    return client


def test_concurrent_clients_get_what_the_loop_alone_gives(worker: Worker) -> None:
    requests = [request(handle, 5 + handle, is_streaming=handle % 2 == 0) for handle in range(1, 13)]
    clients = [submit(worker, engine_request) for engine_request in requests]
    loop = make_loop(ToyTarget(LANGUAGE, LIMITS), ToyDrafter(LANGUAGE, LIMITS), SchedulerConfig("fixed"))
    expected = run(loop, [engine_request.generation_request for engine_request in requests])
    for engine_request, client in zip(requests, clients, strict=True):
        assert client.read_all() == expected[engine_request.generation_request.request_id].token_ids


def test_client_that_does_not_read_does_not_stop_the_loop(worker: Worker, setting: Setting) -> None:
    may_read = Event()
    client = submit(worker, request(1, 40), may_read=may_read)
    while setting.steps.get(timeout=WAIT_S) != 0:  # every step is made while the first response is not read
        assert client.answers.empty()
    may_read.set()
    assert len(client.read_all()) == 40


def test_client_that_cannot_be_answered_does_not_stop_the_others(worker: Worker) -> None:
    submit(worker, request(1, 30), send_error=RuntimeError("broken pipe"))
    assert len(submit(worker, request(2, 30)).read_all()) == 30


@pytest.mark.parametrize("command", [StopCommand(1, ""), StopCommand(None, "mine")])
def test_stop_ends_the_request_it_names_and_no_other(worker: Worker, command: StopCommand) -> None:
    stopped = submit(worker, request(1, LONG, client_id="mine"))
    other = submit(worker, request(2, 50, client_id="other"))
    stopped.next()
    worker.stop(command)
    assert stopped.read_failure()[0] is Failure.CANCELLED
    assert len(other.read_all()) == 50


def test_client_that_left_frees_its_row(worker: Worker, setting: Setting) -> None:
    client = submit(worker, request(1, LONG))
    client.next()
    client.has_left = True
    assert client.read_failure()[0] is Failure.CANCELLED
    while setting.steps.get(timeout=WAIT_S) != 0:
        pass


def test_unacceptable_request_is_answered_alone(worker: Worker) -> None:
    refused = submit(worker, request(1, 0))
    failure, message = refused.read_failure()
    assert failure is Failure.INVALID_ARG
    assert message.startswith("max_tokens: expected an integer >= 1, found 0")
    assert len(submit(worker, request(2, 6)).read_all()) == 6


def test_engine_failure_ends_its_requests_and_the_loop_goes_on(worker: Worker, setting: Setting) -> None:
    setting.target.failures = ["forward"]
    failure, message = submit(worker, request(1, 6)).read_failure()
    assert failure is Failure.INTERNAL
    assert "send the request again" in message
    assert len(submit(worker, request(2, 6)).read_all()) == 6
    assert len(setting.loops) == 1


def test_defect_in_the_loop_reaches_clients_as_an_id_only(
    worker: Worker, setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "/secret/path"

    def break_once() -> None:
        setting.before_step = lambda: None
        raise KeyError(secret)

    setting.before_step = break_once
    with caplog.at_level(logging.ERROR):
        failure, message = submit(worker, request(1, 6)).read_failure()
    assert failure is Failure.INTERNAL
    assert secret not in message
    error_id = message.split()[2].rstrip(";")
    assert error_id in caplog.text
    assert secret in caplog.text
    assert len(submit(worker, request(2, 6)).read_all()) == 6
    assert len(setting.loops) == 2, "the broken loop was replaced"


def test_close_ends_what_still_runs_and_both_threads(setting: Setting) -> None:
    worker = setting.make_worker()
    client = submit(worker, request(1, LONG))
    client.next()
    worker.close()
    assert client.read_failure()[0] is Failure.UNAVAILABLE
    assert not any(thread.is_alive() for thread in worker._threads)


def test_id_of_several_requests_ends_none_and_a_handle_the_one_that_it_names(worker: Worker) -> None:
    """Ids are the clients' own, and "1" is a common one."""
    clients = [submit(worker, request(handle, LONG, client_id="1")) for handle in (1, 2)]
    for client in clients:
        client.next()
    refusals: SimpleQueue[str | None] = SimpleQueue()
    worker.stop(StopCommand(None, "1", refusals.put))
    assert "2 requests have this request id, and none was ended" in (refusals.get(timeout=WAIT_S) or "")
    worker.stop(StopCommand(2, "", refusals.put))
    assert refusals.get(timeout=WAIT_S) is None
    assert clients[1].read_failure()[0] is Failure.CANCELLED
    clients[0].next()


def fill(worker: Worker) -> list[Client]:
    """Every row is taken."""
    clients = [submit(worker, request(100 + index, LONG)) for index in range(LIMITS.max_requests)]
    for client in clients:
        client.next()
    return clients


def test_request_that_is_cancelled_while_it_waits_never_gets_a_row(worker: Worker, setting: Setting) -> None:
    fill(worker)
    by_command, by_leaving = submit(worker, request(1, 5)), submit(worker, request(2, 5))
    worker.stop(StopCommand(1, ""))
    by_leaving.has_left = True
    assert by_command.read_failure()[0] is by_leaving.read_failure()[0] is Failure.CANCELLED
    assert not {"1", "2"} & set(setting.admitted_ids)


def test_ping_finds_the_client_of_an_ensemble_gone_while_it_waits_for_its_one_response(worker: Worker) -> None:
    client = submit(worker, request(1, LONG, is_streaming=False, is_in_ensemble=True))
    tensors, is_last = client.next()
    assert tensors["handle"].item() == -1
    assert not is_last
    worker.stop(StopCommand(1, ""))
    while not isinstance(failure := client.next()[0], Failure):
        pass
    assert failure is Failure.CANCELLED


def test_full_queue_refuses_at_once_and_says_when_to_come_again(setting: Setting) -> None:
    worker = setting.make_worker(max_queued_requests=2)
    fill(worker)
    waiting = [submit(worker, request(handle, 5)) for handle in (1, 2)]
    failure, message = submit(worker, request(3, 5)).read_failure()
    assert failure is Failure.UNAVAILABLE
    assert retry_after_s(message) is not None
    urgent = submit(worker, request(4, 5, priority=-1))
    assert waiting[1].read_failure()[0] is Failure.UNAVAILABLE, "the least urgent makes room"
    for handle in range(100, 100 + LIMITS.max_requests):
        worker.stop(StopCommand(handle, ""))
    assert len(urgent.read_all()) == len(waiting[0].read_all()) == 5
    assert setting.admitted_ids[-2:] == ["4", "1"], "the most urgent first"
    worker.close()


def test_request_that_waits_too_long_is_refused(setting: Setting) -> None:
    worker = setting.make_worker(max_queue_s=0.2)
    fill(worker)
    failure, message = submit(worker, request(1, 5)).read_failure()
    assert failure is Failure.UNAVAILABLE
    assert message.startswith("the server is busy: no row became free within 0.2 s; retry after")
    worker.close()


def test_time_of_a_request_ends_it_where_it_runs_and_where_it_waits(worker: Worker) -> None:
    running = submit(worker, request(1, LONG, timeout_s=0.3))
    fill_rest = [submit(worker, request(100 + index, LONG)) for index in range(LIMITS.max_requests - 1)]
    waiting = submit(worker, request(2, LONG, timeout_s=0.2))
    for client in (waiting, running):
        failure, message = client.read_failure()
        assert failure is Failure.TIMEOUT
        assert message.startswith("timeout_ms: ")
    assert len(fill_rest[0].next()) == 2


def test_drain_ends_what_still_runs_when_its_time_is_over(worker: Worker) -> None:
    short, long = submit(worker, request(1, 8)), submit(worker, request(2, LONG))
    long.next()
    worker.drain(0.3)
    assert worker.is_draining
    assert len(short.read_all()) == 8
    failure, message = long.read_failure()
    assert failure is Failure.UNAVAILABLE
    assert "the server is stopping" in message


def test_probe_is_answered_without_a_row_and_without_tokens(worker: Worker, setting: Setting) -> None:
    fill(worker)
    assert submit(worker, request(1, 1, is_probe=True)).read_all() == []
    assert "1" not in setting.admitted_ids


class PanicException(BaseException):
    """What a panic of native code is to Python: no Exception."""


def test_panic_in_a_step_tells_every_client_and_ends_the_process(worker: Worker, setting: Setting) -> None:
    clients = fill(worker)
    waiting = submit(worker, request(1, 5))

    def panic() -> None:
        raise PanicException("/secret/path")

    setting.before_step = panic
    for client in (*clients, waiting):
        failure, message = client.read_failure()
        assert failure is Failure.INTERNAL
        assert "secret" not in message
        assert "PanicException" not in message
    assert setting.exit_codes.get(timeout=WAIT_S) != 0


def test_response_that_cannot_be_sent_ends_its_request_with_an_error_and_frees_its_row(
    worker: Worker, setting: Setting
) -> None:
    """A token that is lost without a word would be worse than an end."""
    client = submit(worker, request(1, LONG))
    client.next()
    client.send_error = RuntimeError("/secret/path: broken pipe")
    failure, message = client.read_failure()
    assert failure is Failure.INTERNAL
    assert "secret" not in message
    while setting.steps.get(timeout=WAIT_S) != 0:
        pass
