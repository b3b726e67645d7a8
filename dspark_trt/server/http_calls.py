"""The supervisor's own calls to its server."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our own server is behind no proxy
PROBE = {"text_input": "probe", "max_tokens": 1, "probe": True}


def generate(http_url: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """One request to the ensemble through the generate endpoint.

    Raises OSError (HTTPError with the server's message among them).
    """
    body = json.dumps(request).encode()
    call = urllib.request.Request(f"{http_url}/v2/models/ensemble/generate", body, {"Content-Type": "application/json"})
    with _DIRECT.open(call, timeout=timeout_s) as answer:
        decoded: dict[str, Any] = json.load(answer)
    return decoded


def stream(http_url: str, request: dict[str, Any], *, timeout_s: float) -> Iterator[dict[str, Any]]:
    """The responses to one streaming request to the ensemble, as they come.

    Raises OSError, ValueError with the server's message where a request fails on the way.
    """
    url = f"{http_url}/v2/models/ensemble/generate_stream"
    call = urllib.request.Request(url, json.dumps(request).encode(), {"Content-Type": "application/json"})
    with _DIRECT.open(call, timeout=timeout_s) as answer:
        for line in answer:
            if line.startswith(b"data:"):
                event: dict[str, Any] = json.loads(line[5:])
                if "error" in event:
                    raise ValueError(event["error"])
                yield event


def is_ready(http_url: str) -> bool:
    """What the server says of itself. It does not know of processes of its own that died: see `probe`."""
    try:
        with _DIRECT.open(f"{http_url}/v2/health/ready", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:  # not listening yet, or still loading
        return False


def probe(http_url: str, *, timeout_s: float) -> None:
    """One request through all models, answered by the thread that decodes, between two steps and without a row.

    Raises OSError when it is not answered.
    """
    generate(http_url, PROBE, timeout_s=timeout_s)
