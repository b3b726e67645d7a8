"""`dspark-trt build`: the fields of the recipe as options, a plan, and the build."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_trt.building.recipe import BuildRecipe, load_recipe
from dspark_trt.commands.options import AsJson, command, from_home


@command(BuildRecipe)
def build(
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory of the build; made, completed or kept.", parser=from_home)
    ],
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file with any of these options; options win.", parser=from_home),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, and write nothing.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Hash what is kept again.")] = False,
    as_json: AsJson = False,
    *,
    given: dict[str, Any],
) -> None:
    """Turn a target and a drafter into engines, a step table and a Triton model repository."""
    wanted = load_recipe(recipe, given)
    from dspark_trt.building.build import build as run_build
    from dspark_trt.building.plan import make_plan
    from dspark_trt.commands import report
    from dspark_trt.commands.inspect import numerics_of

    plan = make_plan(wanted, output)
    if dry_run:
        if as_json:
            report.print_json(plan.as_json())
        else:
            report.print_plan(plan)
        return
    report.print_choice(plan)
    with report.Bars() as bars:
        results = run_build(plan.recipe, output, verify=verify, progress=bars.update)
    if as_json:
        stages = [asdict(result) for result in results]
        report.print_json({"output": str(output), **plan.as_json(), "stages": stages})
        return
    precision = plan.recipe.precision
    numerics = None if precision == "fp32" else f"{precision}: {numerics_of(output, precision)}"
    report.print_stages(results, output, numerics)
