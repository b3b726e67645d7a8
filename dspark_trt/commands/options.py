"""Typer commands whose options are the fields of a pydantic model, and the options that every command has."""

from __future__ import annotations

import functools
import inspect
import json
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dspark_trt.building.option import default_of, flag_of, option_of, with_flags
from dspark_trt.commands.logs import LogChoice, set_up_log
from dspark_trt.errors import DSparkError, RecipeError

_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "FILE", dict: "JSON"}
_SENT = "; correct this field and send the request again"  # what a client over the network is told to do


def from_home(text: str) -> Path:
    """A path as it was typed: a shell leaves the ~ of `--output=~/x` alone."""
    return Path(text).expanduser()


BuildFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory made by `dspark-trt build`.", parser=from_home)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what the library does: --log-level info.")]
LogLevel = Annotated[str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")]
LogFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the log to this file, too.", parser=from_home)
]
_LOG_OPTIONS = {"verbose": (Verbose, False), "log_level": (LogLevel, None), "log_file": (LogFile, None)}


def command(model: type[BaseModel] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The function as typer takes it. It has the log options; the options of `model` arrive as the dictionary `given`,
    in which only what was given stands, and errors call a field by its option."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [parameter for parameter in own if parameter.name != "given"]
        parameters += [_parameter(name, field) for name, field in model.model_fields.items()] if model else []
        parameters += [_keyword(name, kind, default) for name, (kind, default) in _LOG_OPTIONS.items()]
        parameters.append(_keyword("context", typer.Context, inspect.Parameter.empty))

        @functools.wraps(function)
        def run(*, context: typer.Context, **values: Any) -> None:
            chosen = LogChoice(**{name: values.pop(name) for name in _LOG_OPTIONS})
            set_up_log(chosen.over(context.find_root().obj))
            if model is None:
                function(**values)
                return
            given = _given(model, values)
            with _named_as_options(model, set(given)):
                function(**values, given=given)

        del run.__wrapped__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Values stay text: pydantic reads them, as it reads those of a file, and has one way to refuse them."""
    kind, is_several = _kind(field)
    annotation: Any = bool | None if kind is bool else list[str] | None if is_several else str | None
    default = default_of(field)
    option = typer.Option(
        flag_of(name, field),
        help=f"{field.description}  [default: {default}]" if default else field.description,
        metavar=None if kind is bool else option_of(field).metavar or _metavar(kind),
        show_default=False,
    )
    return _keyword(name, Annotated[annotation, option], None)


def _kind(field: FieldInfo) -> tuple[Any, bool]:
    """The type of a value of an option, None left out, and whether the option may be given several times."""
    kind = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is tuple:
        return get_args(kind)[0], True
    return get_origin(kind) if get_origin(kind) is dict else kind, False


def _metavar(kind: Any) -> str:
    return "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else _METAVARS[kind]


def _given(model: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    given = {}
    for name, field in model.model_fields.items():
        value = values.pop(name)
        if value is not None and value != []:
            given[name] = _object(flag_of(name, field), value) if _kind(field)[0] is dict else value
    return given


def _object(flag: str, text: str) -> dict[str, Any]:
    """Raises RecipeError when `text` is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{flag}: not valid JSON ({error}); expected an object such as '{{\"key\": true}}'") from None
    if not isinstance(value, dict):
        raise RecipeError(f"{flag}: expected a JSON object, found {type(value).__name__}")
    return value


@contextmanager
def _named_as_options(model: type[BaseModel], names: set[str]) -> Iterator[None]:
    try:
        yield
    except DSparkError as error:
        raise as_options(error, model, names) from error


def as_options(error: DSparkError, model: type[BaseModel], names: set[str]) -> DSparkError:
    """The same error, told to someone who typed options."""
    return type(error)(with_flags(str(error).replace(_SENT, ""), model, names))
