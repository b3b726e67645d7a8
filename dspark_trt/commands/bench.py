"""`dspark-trt bench`: throughput of every mode under several loads, interleaved, with intervals and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark_trt.commands.options import AsJson, BuildFolder, command, from_home
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.errors import RecipeError

QUICK_BUDGET_S = 240.0


@command()
def bench(
    folder: BuildFolder,
    quick: Annotated[bool, typer.Option("--quick", help="A short run: at most 5 minutes on 2 cores.")] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='JSON lines {"prompt", "kind"}  [default: packaged]', parser=from_home),
    ] = None,
    modes: Annotated[
        str | None, typer.Option(metavar="MODE,...", help="off, fixed:K, threshold:C, early_stop, auto ...")
    ] = None,
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Requests in flight.")] = "1,8,32",
    kinds: Annotated[
        str | None, typer.Option(metavar="KIND,...", help="mixed, or a kind of the file  [default: all]")
    ] = None,
    repeats: Annotated[int | None, typer.Option(metavar="N", help="Of everything  [default: 5; quick: 3]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of an answer  [default: 96; quick: 32]")] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="OpenAI-compatible server to measure beside; several times.")
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Report: .md, .html or .json; several times.", parser=from_home),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the modes of a build under load, in this process and without a server."""
    counts = counts_of(concurrency)
    asked = None if modes is None else tuple(mode.strip() for mode in modes.split(","))
    for mode in asked or ():
        parse_scheduler(mode)
    if min(repeats or 1, max_tokens or 2) < 1:
        raise RecipeError("--repeats and --max-tokens: expected numbers of at least 1")
    from dspark_trt.commands import report
    from dspark_trt.commands.bench_against import Server
    from dspark_trt.commands.bench_report import as_data, as_markdown, check_report_path, write_report
    from dspark_trt.commands.bench_run import (
        MIXED,
        Plan,
        bench_prompts,
        default_modes,
        loop_runners,
        make_loads,
        measure,
    )
    from dspark_trt.commands.bench_statistics import summarize
    from dspark_trt.deployment import load_deployment
    from dspark_trt.machine import cpu

    for path in output or ():
        check_report_path(path)
    servers = [Server(url) for url in against or ()]
    deployment = load_deployment(folder)
    most = deployment.recipe.max_requests
    if max(counts) > most:
        raise RecipeError(
            f"--concurrency: expected at most {most} requests, as the build has rows, found {max(counts)}"
        )
    texts = bench_prompts(deployment, prompts)
    plan = Plan(
        modes=asked or default_modes(deployment.gamma, is_short=quick),
        concurrencies=counts,
        kinds=tuple(kinds.split(",")) if kinds else (MIXED, *sorted({prompt.kind for prompt in texts})),
        repeats=repeats or (3 if quick else 5),
        max_tokens=max_tokens or (32 if quick else 96),
        is_short=quick,
        budget_s=QUICK_BUDGET_S if quick else None,
    )
    runners = loop_runners(deployment, plan.modes) | {server.name: server.run for server in servers}
    with report.Bars() as bars:
        results = measure(
            runners,
            make_loads(plan, texts, deployment.target.limits.max_seq_len),
            plan,
            lambda done: bars.update("bench", done),
        )
    host = cpu.fingerprint()
    facts = {
        "repeats": 1 + max(result.repeat for result in results),
        "max_tokens": plan.max_tokens,
        "build": folder.name,
        "precision": deployment.recipe.precision,
        "machine": f"{host['cpu']}, {host['num_cores']} cores",
        "remarks": ["Servers are measured from the first request sent to the last answer."] if servers else [],
    }
    summaries = summarize(results, list(runners))
    for path in output or ():
        write_report(path, summaries, facts)
    if as_json:
        report.print_json(as_data(summaries, facts))
    else:
        report.print_line(as_markdown(summaries, facts))
        for path in output or ():
            report.print_line(f"report: {path}")


def counts_of(text: str) -> tuple[int, ...]:
    """The numbers of --concurrency, ascending. Raises RecipeError."""
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = (0,)
    if counts[0] < 1:
        raise RecipeError(f"--concurrency: expected numbers of at least 1 such as 1,8,32, found {text!r}")
    return counts
