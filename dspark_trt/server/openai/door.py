"""What stands before any route: connections that are too slow or cut their bodies into crumbs, and the API key.

uvicorn limits the size of headers and the number of connections itself. It does not limit the time that headers take,
and it looks at every chunk of a body, however small.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import Any

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dspark_trt.server.openai.errors import ApiError
from dspark_trt.server.openai.settings import HEADER_TIMEOUT_S

logger = logging.getLogger(__name__)

_SLICE_BYTES = 16 * 1024  # parsed before it is looked again at how a body comes
_FREE_CHUNKS = 4096
_MIN_CHUNK_BYTES = 64  # on average, once those are used up
_OPEN_PATHS = frozenset(("/", "/health", "/v2/health/ready", "/v2/health/live"))  # without a key: no data behind them


class DoorProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._num_bytes = 0  # of the body of this request as they came, chunk headers included
        self._num_line_breaks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            if self.transport.is_closing():
                return
            piece = data[start : start + _SLICE_BYTES]
            was_body = self.conn.their_state is h11.SEND_BODY
            super().data_received(piece)
            if self.conn.their_state is h11.IDLE:
                self._start_header_timer()
            else:
                self._stop_header_timer()
            if not was_body:
                self._num_bytes = self._num_line_breaks = 0
            self._check_chunks(piece)

    def _check_chunks(self, piece: bytes) -> None:
        """Each chunk costs the parser time and its sender little: end what comes in crumbs."""
        self._num_bytes += len(piece)
        self._num_line_breaks += piece.count(b"\n")
        num_chunks = self._num_line_breaks // 2
        if num_chunks > _FREE_CHUNKS + self._num_bytes // _MIN_CHUNK_BYTES and self._is_chunked():
            logger.warning("a connection was ended: %d chunks in %d bytes", num_chunks, self._num_bytes)
            self.transport.abort()

    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers or ())

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._headers_are_late)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_are_late(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()


class ApiKey:
    """ASGI middleware: without one of the keys nothing of a request is read. No keys: everyone may."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._keys or scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "expected one of this server's API keys as `Authorization: Bearer KEY`",
            kind="authentication_error",
            code="invalid_api_key",
        )
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        await JSONResponse(error.body(), error.status, headers)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]  # all: the time tells nothing
        return scheme.lower() == b"bearer" and any(matches)
