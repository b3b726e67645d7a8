"""What the engine's errors are to a client: its own mistake, a busy server, or an id."""

from __future__ import annotations

import grpc
import pytest

from dspark_trt.server.openai.errors import of_engine, of_text
from dspark_trt.serving.worker import STOPPING


@pytest.mark.parametrize(
    ("text", "status", "param"),
    [
        ("temperature: expected a number in [0, 100], found -1.0", 400, "temperature"),
        ("stop_words: expected at most 16 words, found 17", 400, "stop"),
        ("in ensemble 'ensemble', text_input: the prompt is empty", 400, "prompt"),
        ("in ensemble 'ensemble', unknown field temprature; known fields: a, b", 400, None),
        ("text_input, messages: expected one of them, found both", 400, None),
        ("bad_words and min_tokens: together they mask every token", 400, None),
        ("the text is not valid Unicode; send it as UTF-8", 400, None),
        ("this model has no chat template; send a plain prompt", 400, None),
        ("timeout_ms: expected an integer in 0..86400000, found -1", 400, "timeout_ms"),
        ("timeout_ms: the request did not end within 10 ms and was stopped", 504, "timeout_ms"),
        ("the server is busy: 512 requests wait for a row already; retry after 7 s", 503, None),
        ("the request was cancelled", 503, None),
        (STOPPING, 503, None),
        ("Request for unknown model: 'dspark' has no available versions", 503, None),
        ("internal error 12ab34cd; the server's log says more", 500, None),
    ],
)
def test_errors_within_a_stream_have_a_text_only(text: str, status: int, param: str | None) -> None:
    error = of_text(text)
    assert (error.status, error.param) == (status, param)


def test_a_busy_server_says_when_to_come_again() -> None:
    error = of_engine(grpc.StatusCode.UNAVAILABLE, "the server is busy: ...; retry after 7 s")
    assert (error.status, error.headers) == (503, {"Retry-After": "7"})


def test_a_request_that_took_too_long_is_not_sent_again_by_clients() -> None:
    assert of_text("timeout_ms: the request did not end within 10 ms").headers == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    "text",
    [
        "Stub process 'dspark_0_0' is not healthy.",
        "Failed to process the request(s) for model 'dspark', message: ... At: /home/x/1/model.py(7): execute",
    ],
)
def test_no_words_of_triton_reach_a_client(text: str) -> None:
    error = of_text(text)
    assert error.status == 500
    assert error.message.startswith("internal error ")
    assert "model" not in error.message


def test_no_address_reaches_a_client() -> None:
    error = of_engine(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: ipv4:127.0.0.1:1")
    assert error.status == 503
    assert "127.0.0.1" not in error.message
