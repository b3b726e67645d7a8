"""`make demo`: build the demonstration pair, serve it with a real Triton, stream one answer, load-test it
with and without drafts, and write a report.

python perf/demo.py --target MODEL.gguf --drafter examples/smollm2-135m-dspark --output build/smollm2
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from load_test import measure
from report import print_table
from rich.console import Console

from dspark_trt.errors import DSparkError
from dspark_trt.server.http_calls import stream
from dspark_trt.server.perf_analyzer import find_perf_analyzer
from dspark_trt.server.serve import ServeOptions, TritonServer

QUESTION = "Explain in three sentences why the sky is blue."
MODES = ("off", "fixed:7", "auto")
CONCURRENCIES = (1, 8, 32)
REQUESTS = {1: 8, 8: 24, 32: 64}


def stream_answer(server: TritonServer, question: str) -> None:
    """One chat turn over Triton's generate_stream endpoint (server-sent events), printed as it comes."""
    body = {"text_input": question, "chat": True, "max_tokens": 96, "stream": True}
    for response in stream(server.http_url, body, timeout_s=120):
        print(response["text_output"], end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description="Build, serve and load-test the demonstration pair.")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    console = Console(width=120)

    def headline(text: str) -> None:
        console.print(f"\n[bold]{text}[/]")

    headline(f"1/4  dspark-trt build --target {options.target} --drafter {options.drafter} --output {options.output}")
    pair = ["--target", str(options.target), "--drafter", str(options.drafter), "--output", str(options.output)]
    built = subprocess.run([sys.executable, "-m", "dspark_trt", "build", *pair], check=False)
    if built.returncode:
        sys.exit(built.returncode)

    tool = find_perf_analyzer()
    results = []
    for scheduler in MODES:
        with tempfile.TemporaryDirectory(prefix="dspark-trt-demo-") as folder:
            served = ServeOptions(
                0, 0, 0, scheduler=scheduler, prefix_cache=False, log_file=Path(folder) / "server.log"
            )
            with TritonServer(options.output, served) as server:
                if not results:
                    headline(f"2/4  a real tritonserver answers at {server.http_url}:  {QUESTION}")
                    stream_answer(server, QUESTION)
                    headline(f"3/4  load test through Triton: {', '.join(MODES)} ({tool.origin})")
                for concurrency in CONCURRENCIES:
                    results.append(
                        measure(
                            server.grpc_address, concurrency, scheduler, num_requests=REQUESTS[concurrency], tool=tool
                        )
                    )
    print_table(results, console)
    for concurrency in CONCURRENCIES:
        off, *others = (result for result in results if result.concurrency == concurrency)
        ratios = ", ".join(f"{each.scheduler} {each.tokens_per_s / off.tokens_per_s:.2f}" for each in others)
        console.print(f"concurrency {concurrency}: tokens/s over those of off: {ratios}")
    headline("4/4  the same modes without a server, interleaved: dspark-trt bench --quick")
    bench = ["bench", str(options.output), "--quick", "--kinds", "mixed"]
    report = options.output.with_name(f"{options.output.name}-bench.html")
    done = subprocess.run([sys.executable, "-m", "dspark_trt", *bench, "--output", str(report)], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    console.print(f"report: {report}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server too, as Ctrl-C does
    try:
        main()
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit("interrupted")
