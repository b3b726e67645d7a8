"""Raw HTTP to the front end: for what the official client does not send, and for clients that leave."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

WAIT_S = 60.0


def request(url: str, path: str, body: dict[str, Any] | bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Status and body; a POST where a body is given."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=WAIT_S) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def events(body: bytes) -> list[Any]:
    """The server-sent events, [DONE] left out; bytes that are not UTF-8 or not JSON raise."""
    lines = [line.removeprefix("data: ") for line in body.decode("utf-8", errors="strict").split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def post_and_leave(url: str, path: str, body: dict[str, Any], *, is_read: bool, until: Callable[[], bool]) -> None:
    """Send a request, wait until something is true, read a little where `is_read`, and close the connection."""
    where = urlsplit(url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=WAIT_S) as client:
        client.sendall(head.encode() + data)
        if is_read:
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        wait(until)


def wait(until: Callable[[], bool], seconds: float = WAIT_S) -> float:
    """Seconds until it was true."""
    started = time.monotonic()
    while not until():
        assert time.monotonic() - started < seconds, f"it did not happen within {seconds:g} s"
        time.sleep(0.02)
    return time.monotonic() - started
