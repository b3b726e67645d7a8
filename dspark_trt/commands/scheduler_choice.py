"""The option --scheduler, the same wherever verify lengths are chosen."""

from __future__ import annotations

from typing import Annotated, Literal, overload

import typer

from dspark_trt.contract.scheduler import SchedulerConfig, parse_scheduler
from dspark_trt.errors import RecipeError

SCHEDULERS = "off | fixed | fixed:K | threshold:C | early_stop | lagged_budget | auto"
SchedulerText = Annotated[
    str | None, typer.Option(metavar="MODE", help=f"{SCHEDULERS}  [default: the build's]", show_default=False)
]


@overload
def scheduler_config(text: str | None) -> SchedulerConfig | None: ...
@overload
def scheduler_config(text: str, *, is_build: Literal[True]) -> SchedulerConfig: ...


def scheduler_config(text: str | None, *, is_build: bool = False) -> SchedulerConfig | None:
    """None where nothing was said. Raises RecipeError."""
    if text is None:
        return None
    try:
        return parse_scheduler(text)
    except RecipeError as error:
        message = str(error).removeprefix("scheduler").lstrip(": ")
        where = "the build's scheduler" if is_build else "--scheduler"
        raise RecipeError(f"{where}: {message}; one of {SCHEDULERS}") from None
