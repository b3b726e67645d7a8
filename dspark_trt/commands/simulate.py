"""`dspark-trt simulate`: what to expect of a load, from a step table and an acceptance profile, without any engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_trt.commands.options import AsJson, command, from_home
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.errors import RecipeError


@command()
def simulate(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR|FILE", help="A build, or a step_table.json alone.", parser=from_home),
    ],
    acceptance: Annotated[
        str | None,
        typer.Option(metavar="P,...", help="Conditional acceptance by position  [default: the build's calibration]"),
    ] = None,
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Requests in flight.")] = "1,2,4,8,16,32",
    modes: Annotated[str, typer.Option(metavar="MODE,...", help="Modes to compare.")] = "off,fixed,auto",
    context_tokens: Annotated[int, typer.Option(help="Mean positions that a request holds.")] = 256,
    spread: Annotated[float, typer.Option(help="How much blocks differ: deviation of their logits.")] = 1.0,
    num_steps: Annotated[int, typer.Option("--steps", help="Steps simulated for each figure.")] = 400,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON report of `dspark-trt bench` to compare with.", parser=from_home),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict throughput, the speed of a user and verify_len against load, with the scheduler that serves."""
    wanted = tuple(mode.strip() for mode in modes.split(","))
    for mode in wanted:
        parse_scheduler(mode)
    from dspark_trt.commands import report
    from dspark_trt.commands.bench import counts_of
    from dspark_trt.commands.simulation import compare, read_source, simulate_load

    counts = counts_of(concurrency)
    if num_steps < 10 or context_tokens < 1 or spread < 0:
        raise RecipeError("expected --steps of at least 10, --context-tokens of at least 1, --spread of at least 0")
    table, calibrated = read_source(source)
    chances = _chances(acceptance) if acceptance else calibrated
    if not chances:
        raise RecipeError(
            "--acceptance: expected, since neither a step table alone nor a build with drafter ngram or lookahead "
            "tells; such as .8,.6,.5"
        )
    found = [
        simulate_load(
            table,
            chances,
            mode,
            count,
            context_tokens=context_tokens,
            spread=spread,
            num_steps=num_steps,
        )
        for count in counts
        for mode in wanted
    ]
    errors = compare(found, _read_bench(against)) if against else []
    if as_json:
        report.print_json({"acceptance": chances, "predictions": [each.as_dict() for each in found], "errors": errors})
        return
    report.print_line(
        f"{'in flight':>9} {'mode':<14} {'tokens/s':>9} {'of a user':>9} {'verify_len':>10} {'tokens/step':>11}"
    )
    for each in found:
        report.print_line(
            f"{each.concurrency:>9} {each.mode:<14} {each.tokens_per_s:>11.1f} {each.user_tokens_per_s:>11.1f} "
            f"{each.mean_verify_len:>11.2f} {each.accepted_len:>11.2f}"
        )
    for error in errors:
        report.print_line(
            f"{error['mode']} at {error['concurrency']}: measured {error['measured']:.1f} tokens/s, predicted "
            f"{error['predicted']:.1f} ({error['error']:+.1%})"
        )


def _chances(text: str) -> tuple[float, ...]:
    try:
        chances = tuple(float(part) for part in text.split(","))
    except ValueError:
        chances = ()
    if not chances or not all(0 <= chance <= 1 for chance in chances):
        raise RecipeError(f"--acceptance: expected numbers from 0 to 1 such as .8,.6,.5, found {text!r}")
    return chances


def _read_bench(path: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads(path.read_text())["summaries"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(f"--against {path}: expected a JSON report of `dspark-trt bench` ({error})") from None
