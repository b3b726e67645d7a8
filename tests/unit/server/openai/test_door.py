"""Connections of strangers, on a real socket: slow headers, bodies in crumbs, endless headers, the API key."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from dspark_trt.errors import RecipeError
from dspark_trt.server.openai import door
from dspark_trt.server.openai.body import read_json_object
from dspark_trt.server.openai.door import ApiKey, DoorProtocol
from dspark_trt.server.openai.settings import MAX_HEADER_BYTES, read_api_keys

KEYS = ("first-key-0", "second-key-1")
BODY = b'{"a": 1}'


def make_app() -> FastAPI:
    app = FastAPI()

    @app.post("/echo")
    async def echo(http: Request) -> JSONResponse:
        return JSONResponse(await read_json_object(http, 1_000_000))

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({})

    return app


@contextmanager
def listening(keys: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    config = uvicorn.Config(
        ApiKey(make_app(), keys), http=DoorProtocol, log_config=None, h11_max_incomplete_event_size=MAX_HEADER_BYTES
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with listening() as found:
        yield found


def ask(address: tuple[str, int], *pieces: bytes) -> bytes:
    """All that comes back until the connection is closed; nothing where it is reset."""
    with socket.create_connection(address, timeout=20) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
            return b"".join(iter(lambda: client.recv(65536), b""))
        except ConnectionError:
            return b""


def post(headers: bytes = b"Content-Length: 8\r\n", path: bytes = b"/echo") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_ordinary_requests_pass(address: tuple[str, int]) -> None:
    assert ask(address, post(), BODY).endswith(b'{"a":1}')
    assert ask(address, post(b"Transfer-Encoding: chunked\r\n"), chunked(BODY, 3)).endswith(b'{"a":1}')
    long = json.dumps({"a": ["x" * 20] * 20_000}, indent=0).replace("\n", "\r\n").encode()  # 460 kB, 20 000 lines
    assert b"200 OK" in ask(address, post(b"Content-Length: %d\r\n" % len(long)), long)[:20]
    assert b"200 OK" in ask(address, post(b"Transfer-Encoding: chunked\r\n"), chunked(long, 8192))[:20]


def test_a_body_in_chunks_of_one_byte_is_ended_early(address: tuple[str, int]) -> None:
    """The request that kills a tritonserver before 25.07."""
    body = b'{"a": "' + b"x" * 600_000 + b'"}'
    started = time.monotonic()
    assert ask(address, post(b"Transfer-Encoding: chunked\r\n"), chunked(body, 1)) == b""
    assert time.monotonic() - started < 5.0
    assert ask(address, post(), BODY).endswith(b'{"a":1}')


def test_endless_headers_are_refused(address: tuple[str, int]) -> None:
    assert ask(address, post(b"X-Long: " + b"x" * 2 * MAX_HEADER_BYTES + b"\r\n"), BODY)[:12] in (b"HTTP/1.1 400", b"")


@pytest.mark.parametrize("sent", [b"", b"POST /echo HT"])
def test_headers_that_never_end_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(door, "HEADER_TIMEOUT_S", 0.3)
    with listening() as address:
        started = time.monotonic()
        assert ask(address, sent) == b""
        assert 0.2 < time.monotonic() - started < 5.0


def test_the_key_is_asked_before_a_body_is_read() -> None:
    with listening(KEYS) as address:
        for header in (b"", b"Authorization: Bearer wrong-key\r\n", b"Authorization: Basic first-key-0\r\n"):
            refused = ask(address, post(header + b"Content-Length: 1000000\r\n"))
            assert refused.startswith(b"HTTP/1.1 401")
            assert b"invalid_api_key" in refused
        for key in KEYS:
            header = b"Authorization: Bearer %b\r\nContent-Length: 8\r\n" % key.encode()
            assert ask(address, post(header), BODY).endswith(b'{"a":1}')
        health = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert ask(address, health).startswith(b"HTTP/1.1 200")


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the balancer\nfirst-key-0\n\n  second-key-1\n")
    assert read_api_keys(path) == KEYS
    path.write_text("short\n")
    with pytest.raises(RecipeError, match=r"key 1 of .*8 to 512.*found 5;") as refused:
        read_api_keys(path)
    assert "short" not in str(refused.value)
    path.write_text("# nothing\n")
    with pytest.raises(RecipeError, match="found none"):
        read_api_keys(path)
