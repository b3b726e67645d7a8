"""The front end's process: settings as a line of JSON on standard input, its socket as an inherited descriptor.

    python -m dspark_trt.server.openai DESCRIPTOR

Ends by itself when standard input ends, which it does when `serve` is gone, however it went.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import sys
import threading

import uvicorn

from dspark_trt.log import attach
from dspark_trt.server.openai.app import make_app
from dspark_trt.server.openai.door import ApiKey, DoorProtocol
from dspark_trt.server.openai.settings import MAX_CONNECTIONS, MAX_HEADER_BYTES, FrontEndSettings

_STOP_TIMEOUT_S = 5  # for running requests, once `serve` has ended the engine or asks for the end


def main() -> None:
    settings = FrontEndSettings.model_validate_json(sys.stdin.readline())
    listener = socket.socket(fileno=int(sys.argv[1]))
    _allow_descriptors()
    attach(logging.StreamHandler(), logging.WARNING)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # `serve` decides when this ends
    server = uvicorn.Server(
        uvicorn.Config(
            ApiKey(make_app(settings), settings.api_keys),
            http=DoorProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=65,  # balancers keep theirs for 60 s mostly, and none should write into a closed one
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        )
    )
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    asyncio.run(server.serve(sockets=[listener]))


def _allow_descriptors() -> None:
    """As many as there may be connections, and those that are turned away at once: without a descriptor for it none
    can even be turned away, and shells mostly allow 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MAX_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _end_with_parent(server: uvicorn.Server) -> None:
    sys.stdin.read()
    server.should_exit = True


if __name__ == "__main__":
    main()
