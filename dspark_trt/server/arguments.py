"""How a tritonserver is started: the options of its command line."""

from __future__ import annotations

from collections.abc import Iterator

from dspark_trt.machine.address import in_url, is_ipv6
from dspark_trt.server.options import ServeOptions

EXIT_MARGIN_S = 5  # for requests to be told that their time is over, and for the models to be closed
_RESTRICTED = "shared-memory,trace,logging"  # APIs of Triton that no client of ours needs


def server_arguments(options: ServeOptions, admin_key: str, shared_memory_prefix: str) -> Iterator[str]:
    """All but where the models are. `admin_key`: what a client of a restricted API would have to know."""
    for service, address, port in (
        ("http", _for_libevent(options.address), options.http_port),
        ("grpc", in_url(options.address), options.grpc_port),
        ("metrics", _for_libevent(options.metrics_address), options.metrics_port),
    ):
        yield f"--{service}-address={address}"
        yield f"--{service}-port={port}"
    yield f"--http-restricted-api={_RESTRICTED}:X-Dspark-Admin={admin_key}"
    yield f"--grpc-restricted-protocol={_RESTRICTED}:dspark-admin={admin_key}"
    yield "--disable-auto-complete-config"  # ours are complete: to ask a model, each would be loaded once more
    yield f"--exit-timeout-secs={int(options.drain_s) + EXIT_MARGIN_S}"
    yield "--allow-gpu-metrics=false"
    yield "--pinned-memory-pool-byte-size=0"  # all tensors live in host memory
    yield f"--log-info={str(options.logs_routine).lower()}"
    yield f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix}"
    yield f"--backend-config=python,stub-timeout-seconds={int(options.startup_timeout_s)}"


def _for_libevent(address: str) -> str:
    return f"ipv6:{address}" if is_ipv6(address) else address
