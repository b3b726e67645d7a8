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
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="KIND-to-KIND", help="Runs whose requests turn half-way, such as code-to-chat, told in parts."
        ),
    ] = None,
    repeats: Annotated[int | None, typer.Option(metavar="N", help="Of everything  [default: 5; quick: 3]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of an answer  [default: 96; quick: 32]")] = None,
    min_user_speed: Annotated[
        float | None, typer.Option(metavar="TOKENS/S", help="Tell the best mode and load that gives a user so many.")
    ] = None,
    through_triton: Annotated[
        bool, typer.Option("--through-triton", help="Through tritonservers that are started for it.")
    ] = False,
    against: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="OpenAI-compatible server to measure beside; several times.")
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Report: .md, .html or .json; several times.", parser=from_home),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the modes of a build under load: in this process, or through Triton."""
    counts = counts_of(concurrency)
    asked = None if modes is None else tuple(mode.strip() for mode in modes.split(","))
    for mode in asked or ():
        parse_scheduler(mode)
    if min(repeats or 1, max_tokens or 2) < 1:
        raise RecipeError("--repeats and --max-tokens: expected numbers of at least 1")
    if trace is not None and (through_triton or kinds is not None):
        raise RecipeError("--trace goes without --kinds and --through-triton: a server does not tell its steps")
    from dspark_trt.building.finished import check_servable, read_finished
    from dspark_trt.building.reprofile import table_for_here
    from dspark_trt.checkpoints.spec_json import read_draft_source
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
        trace_of,
    )
    from dspark_trt.commands.bench_sections import Report
    from dspark_trt.commands.bench_statistics import errors_by_mode, summarize, summarize_windows
    from dspark_trt.commands.bench_triton import find_client, measure_through_triton
    from dspark_trt.deployment import load_deployment
    from dspark_trt.machine import cpu
    from dspark_trt.text import TextCodec

    for path in output or ():
        check_report_path(path)
    servers = [Server(url) for url in against or ()]
    for wanted in asked or (None,):
        check_servable(folder, None if wanted is None else parse_scheduler(wanted))
    summary, _ = read_finished(folder)
    recipe = summary.recipe
    gamma, codec = read_draft_source(folder).gamma, TextCodec.load(folder / "checkpoints/tokenizer")
    if max(counts) > recipe.max_requests:
        raise RecipeError(
            f"--concurrency: expected at most {recipe.max_requests} requests, as the build has rows, found "
            f"{max(counts)}"
        )
    texts = bench_prompts(codec, prompts)
    plan = Plan(
        modes=asked or default_modes(gamma, is_short=quick or trace is not None),
        concurrencies=counts,
        kinds=tuple(kinds.split(",")) if kinds else (MIXED, *sorted({prompt.kind for prompt in texts})),
        repeats=repeats or (3 if quick else 5),
        max_tokens=max_tokens or (32 if quick else 96),
        is_short=quick,
        budget_s=QUICK_BUDGET_S if quick else None,
        trace=None if trace is None else trace_of(trace),
    )
    assert recipe.max_seq_len is not None, "of a finished build"
    loads = make_loads(plan, texts, recipe.max_seq_len)
    others = {server.name: server.run for server in servers}
    remarks = ["Servers are measured from the first request sent to the last answer."] if servers else []
    with report.Bars() as bars:
        if through_triton:
            client, measured_by = find_client(is_chat=codec.has_chat_template)
            remarks.append(
                f"Through Triton: a server for each mode in each repeat, measured by {measured_by}, from the first "
                "request sent to the last answer, behind as many requests that warm up as are in flight. Price errors "
                "are the server's own metric, to the width of its buckets, with the steps that read prompts beside "
                "others."
            )
            results = measure_through_triton(
                folder,
                table_for_here(folder, summary),
                client,
                loads,
                plan,
                others,
                lambda done: bars.update("bench through Triton", done),
            )
        else:
            runners = loop_runners(load_deployment(folder), plan.modes) | others
            results = measure(runners, loads, plan, lambda done: bars.update("bench", done))
    host = cpu.fingerprint()
    facts = {
        "repeats": 1 + max(result.repeat for result in results),
        "max_tokens": plan.max_tokens,
        "build": folder.name,
        "precision": recipe.precision,
        "machine": f"{host['cpu']}, {host['num_cores']} cores",
        "remarks": remarks,
    }
    names = [*plan.modes, *others]
    found = Report(
        summaries=summarize(results, names),
        facts=facts,
        price_errors=errors_by_mode(results, names),
        min_user_speed=min_user_speed,
        windows=summarize_windows(results, names),
    )
    for path in output or ():
        write_report(path, found)
    if as_json:
        report.print_json(as_data(found))
    else:
        report.print_line(as_markdown(found))
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
