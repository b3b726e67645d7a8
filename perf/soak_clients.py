"""The clients of a soak: three ways to a server, each a stream of pieces; and what holds the pieces against the answer.

A piece that is lost, comes twice, in another order or with another token makes a `WrongAnswerError`; a stream that ends
with an error, or without an end, a `BrokenStreamError`.
"""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import tritonclient.grpc as grpc
from soak_cases import Case
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

PATIENCE_S = 300.0  # without a piece for so long a stream counts as hanging
_KEPT_S = 60.0  # that a connection is used again after a request; the front end closes it a little later
_REQUEST_IDS = itertools.count(1)


class WrongAnswerError(Exception):
    """A server said something else than the same build does offline."""


class BrokenStreamError(Exception):
    """A request was refused, or ended with an error or without an end."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one response brought; None where the way to the server does not carry it."""

    text: str
    token_ids: tuple[int, ...] | None
    num_tokens: int | None
    finish_reason: str  # empty before the end


class Client(Protocol):
    """One connection; for one thread, one request at a time."""

    def stream(self, fields: dict[str, Any]) -> Iterator[Piece]:
        """The pieces of one request up to the last one. Raises BrokenStreamError."""
        ...

    def fields(self, case: Case) -> dict[str, Any]: ...

    def leave(self) -> None:
        """Close the connection, whatever runs on it; the next request opens another one."""
        ...


class GrpcClient:
    """A gRPC stream to a Triton model: the ensemble, or the engine model behind it."""

    def __init__(self, address: str, model: str, *, takes_ids: bool, patience_s: float = PATIENCE_S) -> None:
        self._address, self._model, self._takes_ids = address, model, takes_ids
        self._patience_s = patience_s
        self._client: grpc.InferenceServerClient | None = None
        self._answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()

    def fields(self, case: Case) -> dict[str, Any]:
        common = {"temperature": _one(0.0, np.float32)}
        if not self._takes_ids:
            text = {"text_input": _one(case.prompt.encode(), np.object_), "max_tokens": _one(case.max_tokens, np.int32)}
            return {**common, **text, "stream": _one(True, np.bool_)}
        return {
            **common,
            "input_ids": np.array([case.prompt_ids], np.int32),
            "input_lengths": _one(len(case.prompt_ids), np.int32),
            "request_output_len": _one(case.max_tokens, np.int32),
            "streaming": _one(True, np.bool_),
        }

    def stream(self, fields: dict[str, Any]) -> Iterator[Piece]:
        request_id, num_pieces = str(next(_REQUEST_IDS)), 0
        try:
            if self._client is None:
                self._open()
            assert self._client is not None, "opened above"
            inputs = [_input(name, array) for name, array in fields.items()]
            self._client.async_stream_infer(self._model, inputs, request_id=request_id)
            while True:
                result, error = self._answers.get(timeout=self._patience_s)
                if error is not None:
                    raise error
                if (found := result.get_response().id) != request_id:
                    raise WrongAnswerError(f"request {request_id} was given a response of request {found}")
                num_pieces += 1
                yield (piece := self._piece(result))
                if piece.finish_reason:
                    return
        except InferenceServerException as error:
            self.leave()
            raise BrokenStreamError(error.message() or str(error)) from None
        except Empty:
            self.leave()
            raise BrokenStreamError(
                f"it hangs: nothing for {self._patience_s:g} s after {num_pieces} responses"
            ) from None

    def leave(self) -> None:
        if self._client is not None:
            self._client.stop_stream(cancel_requests=True)
            self._client.close()
            self._client = None

    def _open(self) -> None:
        self._answers = answers = SimpleQueue()
        self._client = grpc.InferenceServerClient(self._address, channel_args=[("grpc.enable_http_proxy", 0)])
        self._client.start_stream(callback=lambda result, error: answers.put((result, error)))

    def _piece(self, result: grpc.InferResult) -> Piece:
        ids = tuple(result.as_numpy("output_ids").ravel().tolist()) if self._takes_ids else None
        return Piece(
            text=result.as_numpy("text" if self._takes_ids else "text_output").ravel()[0].decode(),
            token_ids=ids,
            num_tokens=int(result.as_numpy("num_output_tokens").item()),
            finish_reason=result.as_numpy("finish_reason").ravel()[0].decode(),
        )


class OpenAiClient:
    """Server-sent events of /v1/completions."""

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        self._where, self._patience_s = urlsplit(url), patience_s
        self._connection: http.client.HTTPConnection | None = None
        self._used_at = 0.0

    def fields(self, case: Case) -> dict[str, Any]:
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        return {"prompt": case.prompt, "max_tokens": case.max_tokens, "temperature": 0.0, **counted}

    def stream(self, fields: dict[str, Any]) -> Iterator[Piece]:
        if time.monotonic() - self._used_at > _KEPT_S:
            self.leave()
        try:
            if self._connection is None:
                host, port = self._where.hostname, self._where.port
                assert host is not None, "an address of ours"
                self._connection = http.client.HTTPConnection(host, port, timeout=self._patience_s)
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", "/v1/completions", json.dumps(fields), headers)
            answer = self._connection.getresponse()
            if answer.status != 200:
                raise BrokenStreamError(f"HTTP {answer.status}: {answer.read().decode(errors='replace')[:300]}")
            yield from self._pieces(answer)
            answer.read()
            self._used_at = time.monotonic()
        except (OSError, http.client.HTTPException) as error:
            self.leave()
            raise BrokenStreamError(f"{type(error).__name__}: {error}") from None
        except BrokenStreamError:
            self.leave()
            raise

    @staticmethod
    def _pieces(answer: http.client.HTTPResponse) -> Iterator[Piece]:
        """The event with the usage comes behind the one with the finish_reason: both make the last piece."""
        reason = ""
        for line in answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise BrokenStreamError(event["error"]["message"])
            if not event["choices"]:
                yield Piece("", None, event["usage"]["completion_tokens"], reason)
                return
            (choice,) = event["choices"]
            reason = choice["finish_reason"] or reason
            yield Piece(choice["text"], None, None, "")
        raise BrokenStreamError("the events ended before the answer did")

    def leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Checker:
    """One answer as it comes, held against what it must be."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._text = ""
        self._token_ids: tuple[int, ...] = ()
        self._num_tokens: int | None = None

    def add(self, piece: Piece) -> None:
        """Raises WrongAnswerError."""
        case = self._case
        self._text += piece.text
        if not case.text.startswith(self._text):
            raise WrongAnswerError(f"text {self._text!r}, expected {case.text!r} for {case.prompt[:80]!r}")
        if piece.num_tokens is not None:
            self._num_tokens = (self._num_tokens or 0) + piece.num_tokens
        if piece.token_ids is not None:
            self._token_ids += piece.token_ids
            if case.token_ids[: len(self._token_ids)] != self._token_ids:
                raise WrongAnswerError(f"tokens {self._token_ids}, expected {case.token_ids} for {case.prompt[:80]!r}")
        if piece.finish_reason:
            self._check_end(piece)

    def _check_end(self, last: Piece) -> None:
        case = self._case
        found = (self._text, self._num_tokens, last.finish_reason)
        expected = (case.text, len(case.token_ids), case.finish_reason)
        if found != expected:
            raise WrongAnswerError(f"an answer ended as {found}, expected {expected} for {case.prompt[:80]!r}")
        if last.token_ids is not None and self._token_ids != case.token_ids:
            raise WrongAnswerError(f"tokens {self._token_ids}, expected {case.token_ids} for {case.prompt[:80]!r}")


def _one(value: Any, dtype: Any) -> np.ndarray:
    return np.array([[value]], dtype=dtype)


def _input(name: str, array: np.ndarray) -> grpc.InferInput:
    made = grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made
