"""The body of a request as a JSON object, within limits of size, time and nesting. No other code reads bodies."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from dspark_trt.server.openai.errors import ApiError, ClientGoneError
from dspark_trt.server.openai.settings import BODY_TIMEOUT_S, MAX_JSON_DEPTH


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Raises ApiError for a body that is too large, too slow, too deep or no JSON object; ClientGoneError."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not read; send the JSON as it is")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="timeout") from None
    return parse_json_object(body)


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(
        413, f"the body is larger than {max_bytes} bytes, more than any prompt of this model takes", code="too_large"
    )
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or len(declared) > 15 or int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


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
