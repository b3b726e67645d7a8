"""`dspark-trt convert`: writes a drafter in another trainer's form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_trt.commands.options import command, from_home
from dspark_trt.errors import RecipeError

if TYPE_CHECKING:
    from dspark_trt.checkpoints.drafters.writing import Form

_FORMS: tuple[Form, ...] = ("deepspec", "speculators", "medusa", "vllm")


@command()
def convert(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="A folder or a hub id, in any form that is read.")],
    target: Annotated[str, typer.Option(metavar="PATH|ID", help="The target that the drafter was trained for.")],
    to: Annotated[str, typer.Option("--to", metavar="|".join(_FORMS), help="The form to write.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="A folder that is not there yet.", parser=from_home)],
    drafter_revision: Annotated[str | None, typer.Option(metavar="REV", help="Of a hub id.")] = None,
    target_revision: Annotated[str | None, typer.Option(metavar="REV", help="Of a hub id.")] = None,
) -> None:
    """Write a DSpark, DFlash or EAGLE-3 drafter in DeepSpec's or speculators' form, Medusa heads in Medusa's or vLLM's;
    what a form cannot hold is refused."""
    form = next((each for each in _FORMS if each == to), None)
    if form is None:
        raise RecipeError(f"--to: expected one of {', '.join(_FORMS)}, found {to!r}")
    if output.exists():
        raise RecipeError(f"--output: {output} is there already; choose a folder that is not")
    from dspark_trt.checkpoints.drafter import read_drafter
    from dspark_trt.checkpoints.drafters.writing import write_drafter
    from dspark_trt.checkpoints.pairing import check_pairing
    from dspark_trt.checkpoints.target import read_target
    from dspark_trt.commands import report
    from dspark_trt.files import replace_folder

    of_target = read_target(target, target_revision)
    of_drafter = read_drafter(drafter, of_target, drafter_revision)
    check_pairing(of_target, of_drafter)
    with replace_folder(output) as scratch:
        write_drafter(of_drafter, of_target, scratch, form, target)
    report.print_line(f"{output}: {drafter} in the form of {form}")
