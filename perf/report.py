"""How a load test is shown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dspark_trt.server.load_result import LoadResult


def print_table(results: Sequence[LoadResult], console: Console) -> None:
    table = Table(title="Load test (perf_analyzer, gRPC streaming)")
    for column in ("scheduler", "concurrency", "requests", "tokens/s", "TTFT ms", "TTFT p95 ms", "inter-token ms"):
        table.add_column(column, justify="left" if column == "scheduler" else "right")
    table.add_column("accepted_len", justify="right")
    table.add_column("mean verify_len", justify="right")
    for result in results:
        table.add_row(
            result.scheduler,
            str(result.concurrency),
            str(result.num_requests),
            f"{result.tokens_per_s:.1f}",
            f"{result.ttft_ms:.0f}",
            f"{result.ttft_p95_ms:.0f}",
            f"{result.inter_token_ms:.1f}",
            f"{result.accepted_len:.2f}",
            f"{result.mean_verify_len:.2f}",
        )
    console.print(table)
