"""The interleaved run through Triton: each repeat starts a tritonserver for every mode, in rotated order."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from dspark_trt.commands.bench_load import Load, Measured
from dspark_trt.commands.bench_run import Plan, Runner
from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.log import Progress, get_logger
from dspark_trt.server.load_metrics import price_errors, read_step_counts, steps_not_drafting
from dspark_trt.server.load_result import LoadResult
from dspark_trt.server.load_test import Row, measure, measure_over_http
from dspark_trt.server.options import ServeOptions
from dspark_trt.server.perf_analyzer import find_perf_analyzer
from dspark_trt.server.supervisor import TritonServer
from dspark_trt.steptable.table import StepTable

Client = Callable[[TritonServer, Load, str, int], LoadResult]  # server, load, mode, requests

logger = get_logger(__name__)


def find_client(*, is_chat: bool) -> tuple[Client, str]:
    """perf_analyzer where it can be had, else threads over HTTP; and what a report says about it.

    is_chat: the prompts are one user turn each.
    """

    def rows(load: Load, count: int) -> list[Row]:
        return [_row(text.text, tokens, is_chat) for text, tokens in islice(load.requests(), count + load.concurrency)]

    try:
        tool = find_perf_analyzer()
    except EnvironmentMissingError as error:
        logger.warning("measuring over HTTP from this process, since there is no perf_analyzer: %s", error)
        return (
            lambda server, load, mode, count: measure_over_http(
                server.http_url, load.concurrency, mode, num_requests=count, rows=rows(load, count)
            ),
            "threads over HTTP",
        )
    return (
        lambda server, load, mode, count: measure(
            server.grpc_address, load.concurrency, mode, num_requests=count, rows=rows(load, count), tool=tool
        ),
        f"perf_analyzer, {tool.origin}",
    )


def _row(text: str, max_tokens: int, is_chat: bool) -> Row:
    row: Row = {"text_input": [text], "max_tokens": [max_tokens], "temperature": [0.0], "stream": [True]}
    row["end_id"] = [-1]  # the end of a text does not end an answer: every mode gives the same tokens
    return row | {"chat": [True]} if is_chat else row


def measure_through_triton(
    folder: Path,
    step_table: StepTable,
    client: Client,
    loads: Sequence[Load],
    plan: Plan,
    others: Mapping[str, Runner],
    progress: Progress = lambda fraction: None,
) -> list[Measured]:
    """All loads of a mode in one life of its server, which prices by `step_table`; `others` are running already.

    Repeats while the budget lasts. Raises LoadTestError when a request fails, and as `TritonServer` does.
    """
    started, longest = time.perf_counter(), 0.0
    names = [*plan.modes, *others]
    results: list[Measured] = []
    for repeat in range(plan.repeats):
        begun = time.perf_counter()
        if repeat and plan.budget_s is not None and begun - started + longest > plan.budget_s:
            break
        shift = repeat % len(names)
        for at, name in enumerate(names[shift:] + names[:shift]):
            if name in others:
                results += [others[name](load, repeat) for load in loads]
            else:
                results += _of_mode(folder, step_table, client, loads, plan, name, repeat)
            progress((repeat + (at + 1) / len(names)) / plan.repeats)
        longest = max(longest, time.perf_counter() - begun)
    progress(1.0)
    return results


def _of_mode(
    folder: Path, step_table: StepTable, client: Client, loads: Sequence[Load], plan: Plan, mode: str, repeat: int
) -> list[Measured]:
    results = []
    with tempfile.TemporaryDirectory(prefix="dspark-trt-bench-") as scratch:
        # every prompt is sent several times, which no server of ours is measured by
        options = ServeOptions(0, 0, 0, scheduler=mode, prefix_cache=False, log_file=Path(scratch) / "server.log")
        with TritonServer(folder, options, step_table) as server:
            for load in loads:
                count = load.num_requests if plan.is_short else max(load.num_requests, 2 * load.concurrency)
                before = read_step_counts(server.metrics_url)
                found = client(server, load, mode, count)
                behind = read_step_counts(server.metrics_url)
                results.append(
                    Measured(
                        mode=mode,
                        kind=load.kind,
                        concurrency=load.concurrency,
                        repeat=repeat,
                        tokens_per_s=found.tokens_per_s,
                        user_tokens_per_s=1e3 / found.inter_token_ms if found.inter_token_ms else None,
                        ttft_ms=found.ttft_ms,
                        mean_verify_len=found.mean_verify_len,
                        accepted_len=found.accepted_len,
                        steps_not_drafting=steps_not_drafting(before, behind),
                        requests_not_drafting=None,
                        requests_looking_up=None,
                        price_errors=price_errors(before, behind),
                    )
                )
    return results
