"""The options of commands whose work the nodes of a Ray cluster can share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark_trt.commands.options import from_home
from dspark_trt.errors import RecipeError

RayAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="HOST:PORT of a Ray cluster, or auto; DIR is at the same path on all."),
]
RecordsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --ray: keep what comes back in this file; the same command again goes on from there.",
        parser=from_home,
    ),
]


def check_records(records: Path | None, ray: str | None) -> None:
    """Raises RecipeError."""
    if records is not None and ray is None:
        raise RecipeError("--records: expected with --ray only; add the address of a cluster, or leave it out")
