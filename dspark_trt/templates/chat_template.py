"""Chat templates: programs that come with a checkpoint, run in jinja2's sandbox with limits on size and time.

The sandbox keeps a template from the machine, not from its time and memory: a line of 20 characters can ask for a
number of a billion digits. So the operators and filters that can make much of little are asked beforehand how long
their result will be, loops and calls are counted, and a render has a deadline. What remains is what one call can do
with a text of the allowed length; a build therefore renders one chat in a process of its own first
(`building/trial.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark_trt.templates.limits import (
    MAX_SOURCE_CHARACTERS,
    WIDE_BRACES,
    WIDE_PERCENT,
    TemplateLimitError,
    check_bits,
    check_growth,
    check_length,
    limited,
    spend,
    written_length,
)


class ChatTemplate:
    """One template, compiled."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateSyntaxError; other errors of compiling depend on the source."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateLimitError(f"it has {len(source)} characters, expected at most {MAX_SOURCE_CHARACTERS}")
        self._template = _environment().from_string(source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """What is raised depends on the template; TemplateLimitError where it would take too much."""
        with limited():
            return self._template.render(variables)


class _LimitedCode(CodeGenerator):
    """Counts what a loop repeats, and texts that are put together by `~`."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        constant = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        counted = nodes.Call(nodes.EnvironmentAttribute("count_round"), [nodes.Const(constant)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(counted, lineno=node.lineno))
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _LimitedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})  # the compiler leaves these to us, constants too

    def count_round(self, num_characters: int) -> None:
        spend(num_characters)

    def concat_texts(self, parts: tuple[Any, ...]) -> str:
        spend(sum(map(written_length, parts)))
        return "".join(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str | list | tuple):
            spend()
            check_length(len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
        elif operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, str | list | tuple) and isinstance(times, int):
                    check_length(len(repeated) * times)
            if isinstance(left, int) and isinstance(right, int):
                check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str) and WIDE_PERCENT.search(left):
            raise TemplateLimitError(f"the width in {left[:40]!r} is too large")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        spend()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            check_growth(__obj.__name__, text, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and WIDE_BRACES.search(value.__self__):
            raise TemplateLimitError(f"the width in {value.__self__[:40]!r} is too large")
        return wrapped


def _limited(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is asked for the length of its result first."""
    first = 1 if hasattr(make, "jinja_pass_arg") else 0

    @functools.wraps(make)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_growth(name, args[first] if len(args) > first else "", args[first + 1 :], kwargs)
        return make(*args, **kwargs)

    return checked


def _output(value: Any) -> Any:
    spend(written_length(value))
    return value


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training masks in some templates;
    here it renders what it encloses."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The helpers and whitespace rules that Hugging Face chat templates are written for."""
    environment = _LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, finalize=_output, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    for name, make in environment.filters.items():
        environment.filters[name] = _limited(name, make)
    environment.filters["format"] = _format
    del environment.globals["lipsum"]  # text without end
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    """jinja2's own, without widths that fill the memory."""
    if WIDE_PERCENT.search(str(value)):
        raise TemplateLimitError(f"the width in {str(value)[:40]!r} is too large")
    return str(value) % (kwargs or args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which a model was never trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
