"""The body of a request as a JSON object, within limits of size, time and nesting. No other code reads bodies."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from dspark_trt.server.openai.errors import ApiError, ClientGoneError
from dspark_trt.server.openai.settings import BODY_TIMEOUT_S, MAX_JSON_DEPTH

_SMALL_BODY_BYTES = 64 * 1024  # these are not counted: all connections together hold little of them
_BODIES_AT_ONCE = 16  # of the largest size
_MIN_MEMORY_BYTES = 64 * 2**20


class BodyMemory:
    """What all bodies that are being read may hold together: one by one each of them is within its limit."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = max(_BODIES_AT_ONCE * max_body_bytes, _MIN_MEMORY_BYTES)
        self._held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises ApiError where there is no room."""
        if self._held_bytes + num_bytes > self._max_bytes:
            raise ApiError(
                503,
                "the server reads many large bodies at the moment; retry after 5 s",
                kind="overloaded_error",
                code="unavailable",
                headers={"Retry-After": "5", "Connection": "close"},
            )
        self._held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes


async def read_json_object(request: Request, max_bytes: int, memory: BodyMemory | None = None) -> dict[str, Any]:
    """Raises ApiError for a body that is too large, too slow, too deep or no JSON object, or for which `memory` has no
    room; ClientGoneError."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not read; send the JSON as it is")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read(request, max_bytes, memory or BodyMemory(max_bytes))
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="timeout") from None
    return parse_json_object(body)


async def _read(request: Request, max_bytes: int, memory: BodyMemory) -> bytes:
    too_large = ApiError(
        413, f"the body is larger than {max_bytes} bytes, more than any prompt of this model takes", code="too_large"
    )
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or len(declared) > 15 or int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    num_taken = 0
    try:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)
            if len(body) > max(num_taken, _SMALL_BODY_BYTES):
                memory.take(len(body) - num_taken)
                num_taken = len(body)
    finally:
        memory.give_back(num_taken)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Raises ApiError."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # also of bytes that are no UTF-8, and of numbers with thousands of digits
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"expected a JSON object, found a JSON {type(value).__name__}", code="invalid_json")
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [item for outer in level for item in _items(outer) if isinstance(item, dict | list)]
        if not level:
            return value
    raise _too_deep()


def _items(container: dict[str, Any] | list[Any]) -> Any:
    return container.values() if isinstance(container, dict) else container


def _too_deep() -> ApiError:
    return ApiError(400, f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels", code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
