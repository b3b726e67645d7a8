"""`dspark-trt eval`: how well the drafter drafts, data set by data set (paper Table 1)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_trt.commands.options import AsJson, BuildFolder, command, from_home
from dspark_trt.commands.ray_options import RayAddress, RecordsFile, check_records
from dspark_trt.errors import RecipeError


@command()
def evaluate(
    folder: BuildFolder,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help='JSON lines {"prompt"}; several times  [default: packaged kinds]', parser=from_home
        ),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Prompts of each data set, at most.")] = 40,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    ray: RayAddress = None,
    records: RecordsFile = None,
    as_json: AsJson = False,
) -> None:
    """Mean accepted_len and conditional acceptance by position, every draft verified.

    Conditional acceptance of position j: accepted drafts j over verified drafts j whose j - 1 predecessors were
    accepted. `generate --json` gives another one, over all verified drafts j.
    """
    if min(limit, max_tokens - 1) < 1:
        raise RecipeError("--limit: expected at least 1; --max-tokens: at least 2")
    check_records(records, ray)
    from dspark_trt.commands import report
    from dspark_trt.commands.acceptance import evaluate_set, read_sets
    from dspark_trt.commands.ray_evaluation import evaluate_over_ray
    from dspark_trt.deployment import load_deployment

    sets = {name: texts[:limit] for name, texts in read_sets(prompts or ()).items()}
    wanted: Any = {"max_tokens": max_tokens, "temperature": temperature}
    found = []
    with report.Bars() as bars:
        if ray is not None:
            found = evaluate_over_ray(
                ray, folder, sets, **wanted, records=records, progress=lambda done: bars.update("eval", done)
            )
        else:
            deployment = load_deployment(folder)
            for at, (name, texts) in enumerate(sets.items(), 1):
                found.append(evaluate_set(deployment, name, texts, **wanted))
                bars.update("eval", at / len(sets))
    if as_json:
        report.print_json({"temperature": temperature, "sets": [asdict(each) for each in found]})
        return
    report.print_line(f"{'data set':<24} {'prompts':>7} {'accepted_len':>12}   conditional acceptance by position")
    for each in found:
        by_position = " ".join("   -" if value is None else f"{value:.2f}" for value in each.conditional_acceptance)
        report.print_line(f"{each.name:<24} {each.num_prompts:>7} {each.accepted_len:>12.2f}   {by_position}")
