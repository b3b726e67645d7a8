"""Clients as users write them: HTTP with the standard library, gRPC with tritonclient."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from urllib.error import HTTPError

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

WAIT_S = 120.0


def post(http_url: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of one request to /v2/models/<path>."""
    request = urllib.request.Request(f"{http_url}/v2/models/{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def generate(http_url: str, **fields: Any) -> dict[str, Any]:
    """One request without streaming, which must succeed."""
    status, body = post(http_url, "ensemble/generate", fields)
    assert status == 200, body
    answer: dict[str, Any] = json.loads(body)
    return answer


def generate_stream(http_url: str, **fields: Any) -> list[dict[str, Any]]:
    """The server-sent events of one streaming request; bytes that are not UTF-8 or not JSON raise."""
    status, body = post(http_url, "ensemble/generate_stream", {"stream": True, **fields})
    assert status == 200, body
    events = [line.removeprefix("data: ") for line in body.decode("utf-8", errors="strict").split("\n\n") if line]
    return [json.loads(event) for event in events]


def refusal(http_url: str, **fields: Any) -> str:
    """The message of a request that must be refused."""
    status, body = post(http_url, "ensemble/generate", fields)
    assert status == 400, body
    message: str = json.loads(body)["error"]
    return message


def metrics(metrics_url: str) -> dict[str, float]:
    """Every sample by its name and labels."""
    with urllib.request.urlopen(metrics_url, timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def tensor(name: str, array: np.ndarray) -> grpc.InferInput:
    made = grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def one(value: Any, dtype: Any) -> np.ndarray:
    """The wire shape of a scalar field, [1, 1]."""
    return np.array([[value]], dtype=dtype)


class Stream:
    """One bidirectional gRPC stream; many requests may share it."""

    def __init__(self, address: str) -> None:
        self.client = grpc.InferenceServerClient(address)
        self._answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self.client.start_stream(callback=lambda result, error: self._answers.put((result, error)))

    def send(self, model: str, arrays: dict[str, np.ndarray], **options: Any) -> None:
        self.client.async_stream_infer(model, [tensor(name, array) for name, array in arrays.items()], **options)

    def next(self) -> grpc.InferResult:
        """Raises the InferenceServerException that the server answered with."""
        result, error = self._answers.get(timeout=WAIT_S)
        if error is not None:
            raise error
        return result

    def read_all(self) -> list[grpc.InferResult]:
        """The responses of one request, up to the one marked final."""
        results = [self.next()]
        while not results[-1].get_response().parameters["triton_final_response"].bool_param:
            results.append(self.next())
        return results

    def read_error(self) -> InferenceServerException:
        """The error that ends the request, responses before it skipped."""
        while True:
            try:
                self.next()
            except InferenceServerException as error:
                return error


@contextmanager
def stream(address: str) -> Iterator[Stream]:
    opened = Stream(address)
    try:
        yield opened
    finally:
        opened.client.stop_stream(cancel_requests=True)
        opened.client.close()


def text_of(result: grpc.InferResult) -> str:
    """As the clients of TensorRT-LLM's backend read it."""
    text: str = result.as_numpy("text_output")[0].decode()
    return text
