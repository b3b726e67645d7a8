"""How a pydantic field looks as an option of the command line: what its type and description do not say themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

MAX_SHOWN = 120  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Option:
    """Metadata of a field, as in `Annotated[int | None, Option(default="the cores here")]`."""

    default: str | None = None  # what the default means, in words; None: its value is shown
    flag: str | None = None  # None: the field's name with hyphens
    metavar: str | None = None  # None: from the field's type


def option_of(field: FieldInfo) -> Option:
    return next((item for item in field.metadata if isinstance(item, Option)), Option())


def flag_of(name: str, field: FieldInfo) -> str:
    return option_of(field).flag or f"--{name.replace('_', '-')}"


def default_of(field: FieldInfo) -> str | None:
    """The default in words; None where there is none to speak of."""
    if (words := option_of(field).default) is not None:
        return words
    default = field.get_default(call_default_factory=True) if not field.is_required() else None
    return None if default in (None, (), {}, False, "") else str(default)


def abridged(value: Any) -> str:
    """`value` as a message shows it: a prompt of a megabyte is not printed whole."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text)} characters)"


def options_table(model: type[BaseModel]) -> Iterator[str]:
    """The lines of the Markdown table of a model's options, for the documentation."""
    yield "| option | default | what it decides |"
    yield "|---|---|---|"
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else default_of(field) or ""
        cells = (f"`{flag_of(name, field)}`", default, field.description or "")
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def with_flags(message: str, model: type[BaseModel], names: Iterator[str] | set[str]) -> str:
    """`message` with the field that it begins with, where it is one of `names`, called as the option that it came
    by."""
    found = re.match(r"(\w+)(?=[:.\[ ])", message)
    if found is None or found[1] not in set(names) or found[1] not in model.model_fields:
        return message
    return flag_of(found[1], model.model_fields[found[1]]) + message[found.end() :]
