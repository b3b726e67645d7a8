"""How much a chat template may make of how little, and how long it may take."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2

MAX_CHARACTERS = 2**24  # that a render writes, parts of it that are put together again counted each time
MAX_SOURCE_CHARACTERS = 2**20
RENDER_TIMEOUT_S = 5.0
_MAX_NUMBER = 100_000  # widths, indents, counts: what jinja2 allows of range()
_MAX_ITEMS = 2**18  # of a list and the lists in it, where it is written out
_MAX_BITS = 4096  # of a product or a power
_OF_CONTAINERS = frozenset(  # filters that put nothing together as a text
    [
        *("length", "count", "first", "last", "default", "d", "list", "map", "select", "selectattr", "reject"),
        *("rejectattr", "sort", "unique", "reverse", "items", "dictsort", "groupby", "min", "max", "sum", "slice"),
        *("batch", "random", "attr", "abs", "int", "float", "round"),
    ]
)
WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\d{5}|\*)")
WIDE_BRACES = re.compile(r":[^}]*(\d{5}|\{)")


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template makes too much of too little."""


class _Budget:
    """What one render may still use."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + RENDER_TIMEOUT_S
        self._num_characters = MAX_CHARACTERS

    def spend(self, num_characters: int = 0) -> None:
        self._num_characters -= num_characters
        if self._num_characters < 0:
            raise TemplateLimitError(f"it makes more than {MAX_CHARACTERS} characters")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"it takes more than {RENDER_TIMEOUT_S:g} s")


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def limited() -> Iterator[None]:
    """One render."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def check_length(num_characters: int) -> None:
    if num_characters > MAX_CHARACTERS:
        raise TemplateLimitError(f"it makes a text or list of {num_characters}, expected at most {MAX_CHARACTERS}")


def spend(num_characters: int = 0) -> None:
    if budget := _budget.get(None):  # None: while constants are put together by the compiler
        budget.spend(num_characters)


def written_length(value: Any) -> int:
    """About how long a value is as a text. Raises TemplateLimitError where that is too much to find out."""
    total, num_items, waiting = 0, 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        num_items += 1
        if num_items + len(waiting) > _MAX_ITEMS:
            raise TemplateLimitError(f"it writes a list of more than {_MAX_ITEMS} items")
    check_length(total + num_items)
    return total + num_items


def check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise TemplateLimitError(f"it computes a number of more than {_MAX_BITS} bits")


def check_growth(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Of a filter, or a method of a text: is what it makes of `value` of a reasonable length?"""
    given = [*args, *kwargs.values()]
    if any(isinstance(number, int) and abs(number) > _MAX_NUMBER for number in given):
        raise TemplateLimitError(f"{name}: a number is larger than {_MAX_NUMBER}")
    if name in _OF_CONTAINERS:
        return
    text = value if isinstance(value, str) else ""
    length = len(text) if text else written_length(value)
    texts = [argument for argument in given if isinstance(argument, str)]
    texts += [
        entry for table in given if isinstance(table, Mapping) for entry in table.values() if isinstance(entry, str)
    ]
    if name == "replace" and len(texts) >= 2:
        length += text.count(texts[0]) * len(texts[1])
    elif name == "join" and isinstance(value, str):
        length = sum(written_length(part) + len(value) for part in given)
        length += sum(len(value) * len(part) for part in given if isinstance(part, list | tuple | str))
    elif name in ("join", "translate", "urlize", "wordwrap", "xmlattr"):
        length *= 1 + max(map(len, texts), default=0)
    elif name in ("indent", "expandtabs"):
        width = max((argument if isinstance(argument, int) else len(argument) for argument in given), default=8)
        length += (text.count("\n") + text.count("\t") + 1) * width
    elif name == "tojson":
        length *= 1 + max((argument for argument in given if isinstance(argument, int)), default=0)
    spend()
    check_length(length)
