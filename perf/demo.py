"""`make demo`: build the demonstration pair, serve it with a real Triton, stream one answer, and load-test it through
Triton: without drafts, with all of them, and with the default scheduler, in turns.

python perf/demo.py --target MODEL.gguf --drafter examples/smollm2-135m-dspark --output build/smollm2
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from dspark_trt.errors import DSparkError
from dspark_trt.server.http_calls import stream
from dspark_trt.server.serve import ServeOptions, TritonServer

QUESTION = "Explain in three sentences why the sky is blue."
MODES = "off,fixed:7,auto"


def stream_answer(server: TritonServer, question: str) -> None:
    """One chat turn over Triton's generate_stream endpoint (server-sent events), printed as it comes."""
    body = {"text_input": question, "chat": True, "max_tokens": 96, "stream": True}
    for response in stream(server.http_url, body, timeout_s=120):
        print(response["text_output"], end="", flush=True)
    print()


def run(console: Console, step: str, *arguments: str) -> None:
    """One command of the package, shown as a person would type it; ends where it fails."""
    console.print(f"\n[bold]{step}  dspark-trt {' '.join(arguments)}[/]")
    done = subprocess.run([sys.executable, "-m", "dspark_trt", *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build, serve and load-test the demonstration pair.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    console = Console(width=120)
    folder = str(options.output)
    run(console, "1/3", "build", "--target", options.target, "--drafter", options.drafter, "--output", folder)
    with tempfile.TemporaryDirectory(prefix="dspark-trt-demo-") as scratch:
        served = ServeOptions(0, 0, 0, log_file=Path(scratch) / "server.log")
        with TritonServer(options.output, served) as server:
            console.print(f"\n[bold]2/3  a real tritonserver answers at {server.http_url}:  {QUESTION}[/]")
            stream_answer(server, QUESTION)
    html = str(options.output.with_name(f"{options.output.name}-bench.html"))
    load = ["--modes", MODES, "--concurrency", "1,8,32", "--kinds", "mixed"]
    run(console, "3/3", "bench", folder, "--through-triton", "--quick", *load, "--output", html)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server too, as Ctrl-C does
    try:
        main()
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit("interrupted")
