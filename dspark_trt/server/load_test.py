"""Loads a running server: with perf_analyzer, or, where that cannot be had, with threads of this process over HTTP."""

from __future__ import annotations

import json
import logging
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dspark_trt.errors import DSparkError
from dspark_trt.server.http_calls import stream
from dspark_trt.server.load_result import LoadResult, ServedRequest, load_result, read_export
from dspark_trt.server.perf_analyzer import PerfAnalyzer

TIMEOUT_S = 600
NUM_ATTEMPTS = 3

Row = dict[str, list[Any]]  # fields of a request, as perf_analyzer's input data has them

logger = logging.getLogger(__name__)


class LoadTestError(DSparkError):
    """perf_analyzer failed, or a request of the load did."""


def measure(
    grpc_address: str,
    concurrency: int,
    scheduler: str,
    *,
    num_requests: int,
    rows: Sequence[Row],
    tool: PerfAnalyzer,
) -> LoadResult:
    """Load a running server with `num_requests` measured requests, `rows` in turn, behind `concurrency` that warm up.

    `scheduler` is what the result is called. A load whose export is cut short is repeated: perf_analyzer now and then
    ends well with a part of the file unwritten. Raises LoadTestError.
    """
    for _ in range(NUM_ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="dspark-trt-load-") as folder:
            export = Path(folder) / "export.json"
            _run(tool, grpc_address, concurrency, num_requests + concurrency, rows, export)
            try:
                return read_export(export, scheduler=scheduler, num_warmup=concurrency)
            except json.JSONDecodeError as error:
                logger.warning("perf_analyzer left its export incomplete (%s); measuring again", error)
            except ValueError as error:
                raise LoadTestError(str(error)) from None
    raise LoadTestError(f"perf_analyzer left its export incomplete {NUM_ATTEMPTS} times")


def _run(
    tool: PerfAnalyzer, grpc_address: str, concurrency: int, num_requests: int, rows: Sequence[Row], export: Path
) -> None:
    inputs = export.with_name("inputs.json")
    inputs.write_text(json.dumps({"data": rows}))
    options = {
        "-m": "ensemble",
        "-u": grpc_address,
        "-i": "grpc",
        "--input-data": inputs,
        "--concurrency-range": f"{concurrency}:{concurrency}",
        "--request-count": num_requests,
        "--profile-export-file": export,
    }
    command = [
        str(tool.executable),
        "--streaming",
        "--async",
        *(str(part) for pair in options.items() for part in pair),
    ]
    measure_the_server_itself = {"no_grpc_proxy": grpc_address.rpartition(":")[0]}
    environment = {**tool.environment(), **measure_the_server_itself}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise LoadTestError(
            f"perf_analyzer did not finish {num_requests} requests within {TIMEOUT_S} s; measure fewer requests, or "
            "look at the server's log"
        ) from None
    if done.returncode != 0 or not export.exists():
        raise LoadTestError(f"perf_analyzer failed against {grpc_address}:\n{(done.stdout + done.stderr)[-2000:]}")


def measure_over_http(
    http_url: str, concurrency: int, scheduler: str, *, num_requests: int, rows: Sequence[Row]
) -> LoadResult:
    """The same load from threads of this process, which take a share of its cores. Raises LoadTestError."""
    wanted = [rows[at % len(rows)] for at in range(num_requests + concurrency)]
    with ThreadPoolExecutor(concurrency) as pool:
        requests = list(pool.map(lambda row: _answer(http_url, row), wanted))
    return load_result(requests, scheduler=scheduler, concurrency=concurrency, num_warmup=concurrency)


def _answer(http_url: str, row: Row) -> ServedRequest:
    fields = {name: values[0] if len(values) == 1 else values for name, values in row.items()}
    sent = time.perf_counter()
    times, outputs = [], []
    try:
        for output in stream(http_url, fields, timeout_s=TIMEOUT_S):
            times.append(time.perf_counter() * 1e3)
            outputs.append(output)
        return ServedRequest.of(sent * 1e3, times, outputs)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise LoadTestError(f"a request of the load failed: {error}; look at the server's log") from None
