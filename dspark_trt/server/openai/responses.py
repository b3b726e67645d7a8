"""Answers that end when their client does: JSON that is awaited, and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark_trt.server.openai.errors import ClientGoneError
from dspark_trt.server.openai.settings import SEND_TIMEOUT_S

Result = TypeVar("Result")
_EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the latter: nginx hands events on at once


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes. The body must have been read.

    Raises ClientGoneError, and what `work` raises.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. The iterator is closed as soon as the client is gone, or has not read for a minute."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        """`first` was taken from the iterator already, so that a refusal could have its own status."""
        super().__init__(status_code=200, headers=_EVENT_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            await _close(self._events)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send_body(send, self._first, more_body=True)
        async for body in self._events:
            if body:
                await self._send_body(send, body, more_body=True)
        await self._send_body(send, b"", more_body=False)

    async def _send_body(self, send: Send, body: bytes, *, more_body: bool) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": more_body})


async def first_event(events: AsyncGenerator[bytes, None]) -> bytes:
    """The first event that says something; the iterator is closed when there is none, or a failure instead."""
    try:
        async for body in events:
            if body:
                return body
    except BaseException:
        await _close(events)
        raise
    raise ClientGoneError


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _close(events: AsyncGenerator[bytes, None]) -> None:
    with contextlib.suppress(Exception):
        await events.aclose()
