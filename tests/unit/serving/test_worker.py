"""The worker: clients of every kind around one loop, none of which can stop it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import Any

import numpy as np
import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.serving.adapter import EngineRequest, ResponseWriter, StopCommand
from dspark_trt.serving.failures import Failure
from dspark_trt.serving.worker import Ticket, Worker
from tests.support.toy_engines import ToyDrafter, ToyLanguage, ToyTarget, letters, make_loop, run

LANGUAGE = ToyLanguage(vocab_size=23)
LIMITS = EngineLimits(max_slots=4, max_seq_len=4096, max_batch_tokens=64)
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


def request(handle: int, num_tokens: int, *, is_streaming: bool = True, client_id: str = "") -> EngineRequest:
    generation = GenerationRequest(
        request_id=str(handle), prompt_ids=(1, 2, handle % 23), sampling=SamplingParams(max_tokens=num_tokens)
    )
    return EngineRequest(generation, handle, client_id, is_streaming, echoes_prompt=False)


def ticket(engine_request: EngineRequest, client: Client) -> Ticket:
    return Ticket(engine_request, ResponseWriter(engine_request, letters), client)


@dataclass
class Setting:
    """A worker over toy engines, and the way to reach into them."""

    target: ToyTarget = field(default_factory=lambda: ToyTarget(LANGUAGE, LIMITS))
    drafter: ToyDrafter = field(default_factory=lambda: ToyDrafter(LANGUAGE, LIMITS))
    before_step: Callable[[], None] = lambda: None
    loops: list[DecodingLoop] = field(default_factory=list)
    steps: SimpleQueue[int] = field(default_factory=SimpleQueue)

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
    worker = Worker(setting.make_loop, lambda loop: setting.steps.put(loop.num_running))
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
    expected = run(loop, [engine_request.generation for engine_request in requests])
    for engine_request, client in zip(requests, clients, strict=True):
        assert client.read_all() == expected[engine_request.generation.request_id].token_ids


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


def test_client_that_left_frees_its_slot(worker: Worker, setting: Setting) -> None:
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
    worker = Worker(setting.make_loop, lambda loop: None)
    client = submit(worker, request(1, LONG))
    client.next()
    worker.close()
    assert client.read_failure()[0] is Failure.UNAVAILABLE
    assert not any(thread.is_alive() for thread in worker._threads)
