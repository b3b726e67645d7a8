"""Load tests with perf_analyzer: throughput, latency and draft statistics, drafting on and off side by side.

    python perf/load_test.py build/smollm2                        # starts a server for each scheduler, compares them
    python perf/load_test.py --address 127.0.0.1:8001             # measures a server that is already running

Loads are bounded: a fixed number of requests over the prompts in perf/data, behind a warm-up of `concurrency` requests.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from report import print_table
from rich.console import Console

from dspark_trt.errors import DSparkError
from dspark_trt.server.load_result import LoadResult
from dspark_trt.server.load_test import Row
from dspark_trt.server.load_test import measure as measure_load
from dspark_trt.server.perf_analyzer import PerfAnalyzer, find_perf_analyzer
from dspark_trt.server.serve import ServeOptions, TritonServer

DATA = Path(__file__).parent / "data"
PROMPTS = tuple(sorted(DATA.glob("*.json")))
ON_AND_OFF = ("early_stop", "off")


def compare(
    build_dir: Path,
    *,
    schedulers: Sequence[str] = ON_AND_OFF,
    concurrencies: Sequence[int] = (1, 8),
    num_requests: int | None = None,
    tool: PerfAnalyzer | None = None,
) -> list[LoadResult]:
    """Serve the build once for each scheduler and load it at each concurrency."""
    tool = tool or find_perf_analyzer()
    results = []
    for scheduler in schedulers:
        with tempfile.TemporaryDirectory(prefix="dspark-trt-load-") as folder:
            options = ServeOptions(
                0, 0, 0, scheduler=scheduler, prefix_cache=False, log_file=Path(folder) / "server.log"
            )
            with TritonServer(build_dir, options) as server:
                for concurrency in concurrencies:
                    results.append(
                        measure(server.grpc_address, concurrency, scheduler, num_requests=num_requests, tool=tool)
                    )
    return results


def measure(
    grpc_address: str, concurrency: int, scheduler: str, *, num_requests: int | None = None, tool: PerfAnalyzer
) -> LoadResult:
    """Load a running server with the prompts in perf/data.

    `num_requests` measured requests (default: 12, at least 3 rounds of `concurrency`). Raises LoadTestError.
    """
    count = num_requests or max(12, 3 * concurrency)
    rows = alternating(PROMPTS)
    return measure_load(grpc_address, concurrency, scheduler, num_requests=count, rows=rows, tool=tool)


def alternating(prompts: Iterable[Path]) -> list[Row]:
    """One prompt of each file after the other, so that every stretch of a load has all kinds."""
    kinds = [json.loads(path.read_text())["data"] for path in prompts]
    return [prompt for round_ in zip(*kinds, strict=True) for prompt in round_]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Load a build, or a running server, with perf_analyzer.")
    parser.add_argument("build", type=Path, nargs="?", help="build directory; a server is started for each scheduler")
    parser.add_argument("--address", help="gRPC address of a running server, instead of a build")
    parser.add_argument("--scheduler", action="append", help="may be given several times  [default: early_stop, off]")
    parser.add_argument("--concurrency", type=int, action="append", help="may be given several times  [default: 1, 8]")
    parser.add_argument("--requests", type=int, help="measured requests of each load")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    if (options.build is None) == (options.address is None):
        parser.error("give a build directory or --address")
    concurrencies = options.concurrency or (1, 8)
    tool = find_perf_analyzer()
    print(f"perf_analyzer: {tool.origin}", file=sys.stderr)
    if options.address:
        results = [
            measure(options.address, concurrency, "as served", num_requests=options.requests, tool=tool)
            for concurrency in concurrencies
        ]
    else:
        results = compare(
            options.build,
            schedulers=options.scheduler or ON_AND_OFF,
            concurrencies=concurrencies,
            num_requests=options.requests,
            tool=tool,
        )
    print_table(results, Console(width=120))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server too, as Ctrl-C does
    try:
        main(sys.argv[1:])
    except DSparkError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
