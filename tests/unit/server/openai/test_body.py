"""Bodies of strangers: what is no JSON object within the limits is refused before anything reads it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from starlette.requests import Request

from dspark_trt.server.openai.body import BodyMemory, parse_json_object, read_json_object
from dspark_trt.server.openai.errors import ApiError, ClientGoneError
from dspark_trt.server.openai.settings import MAX_JSON_DEPTH


def read(*messages: dict[str, Any], headers: dict[str, str] | None = None, max_bytes: int = 100) -> Any:
    waiting = list(messages)

    async def receive() -> dict[str, Any]:
        return waiting.pop(0)

    return asyncio.run(read_json_object(as_request(receive, headers), max_bytes))


def as_request(receive: Any, headers: dict[str, str] | None = None) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)


def piece(body: bytes, more_body: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more_body}


def test_a_body_in_pieces_is_one() -> None:
    assert read(piece(b'{"a": ', True), piece(b'"\xc3\xa4"}')) == {"a": "ä"}


@pytest.mark.parametrize(
    ("messages", "headers", "status"),
    [
        ([piece(b"x" * 60, True), piece(b"x" * 60)], {}, 413),  # counted, whatever the headers say
        ([], {"content-length": "101"}, 413),  # and not read at all
        ([], {"content-length": "1" * 5000}, 413),
        ([], {"content-length": "-1"}, 413),
        ([], {"content-encoding": "gzip"}, 415),
        ([piece(b"[1]")], {}, 400),
        ([piece(b"")], {}, 400),
    ],
)
def test_bodies_that_are_refused(messages: list[Any], headers: dict[str, str], status: int) -> None:
    with pytest.raises(ApiError) as refused:
        read(*messages, headers=headers)
    assert refused.value.status == status


def test_many_large_bodies_at_once_are_bounded_together_and_small_ones_are_always_read() -> None:
    """A thousand connections, each within the limit of a body, held gigabytes of a long-context model for 30 s."""
    largest = 8 * 2**20
    memory = BodyMemory(largest)

    async def slow(end: asyncio.Event) -> None:
        received = iter([piece(b" " * (largest - 10), True)])

        async def receive() -> dict[str, Any]:
            if (message := next(received, None)) is not None:
                return message
            await end.wait()
            return {"type": "http.disconnect"}

        with contextlib.suppress(ClientGoneError):
            await read_json_object(as_request(receive), largest, memory)

    async def quick(size: int) -> dict[str, Any]:
        received = iter([piece(b" " * (size - 2), True), piece(b"{}")])

        async def receive() -> dict[str, Any]:
            return next(received)

        return await read_json_object(as_request(receive), largest, memory)

    async def run() -> None:
        end = asyncio.Event()
        held = [asyncio.create_task(slow(end)) for _ in range(16)]
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="reads many large bodies") as refused:
            await quick(200_000)
        assert refused.value.status == 503
        assert refused.value.headers["Retry-After"]
        assert await quick(60_000) == {}
        end.set()
        await asyncio.gather(*held)
        assert await quick(200_000) == {}

    asyncio.run(run())


def test_a_client_that_leaves_while_it_sends() -> None:
    with pytest.raises(ClientGoneError):
        read(piece(b"{", True), {"type": "http.disconnect"})


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_that_overflows_the_stack_of_a_parser(depth: int, opening: bytes, closing: bytes) -> None:
    with pytest.raises(ApiError, match="nested deeper"):
        parse_json_object(b'{"x":' + opening * depth + b"1" + closing * depth + b"}")


def test_nesting_up_to_the_limit_is_read() -> None:
    depth = MAX_JSON_DEPTH - 1
    assert parse_json_object(b'{"x":' + b"[" * depth + b"]" * depth + b"}")


@pytest.mark.parametrize("text", [b'{"x": NaN}', b'{"x": Infinity}', b'{"x": ' + b"9" * 5000 + b"}", b'"\xff"', b"{"])
def test_what_only_python_would_read_as_json(text: bytes) -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        parse_json_object(text)
