"""A request's state is written by its own methods, in runtime/state.py, and nowhere else in the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import dspark_trt
from dspark_trt.runtime.metrics import RequestStatistics
from dspark_trt.runtime.state import RequestState

PACKAGE = Path(dspark_trt.__file__).parent
FIELDS = {field.name for field in fields(RequestState)}
OF_STATISTICS = {field.name for field in fields(RequestStatistics)}
CHANGING = {"append", "extend", "insert", "pop", "remove", "clear", "fill", "sort", "record_step"}
CONTAINERS = {"generated_ids", "words", "prompt_ids", "statistics"}


def writes(source: str) -> Iterator[str]:
    """What a module assigns to, or changes in place, that looks like a field of a request's state."""
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            changed = node.func.value
            if isinstance(changed, ast.Attribute) and changed.attr in CONTAINERS and not _is_self(changed.value):
                yield ast.unparse(node.func)
        for target in targets:
            yield from (ast.unparse(written) for written in _attributes(target) if _is_of_a_state(written))


def _attributes(target: ast.expr) -> Iterator[ast.Attribute]:
    """What an assignment writes to; of `a.b[c.d]` that is `a.b`."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _attributes(element)
    elif isinstance(target, ast.Subscript | ast.Starred):
        yield from _attributes(target.value)
    elif isinstance(target, ast.Attribute):
        yield target


def _is_of_a_state(written: ast.Attribute) -> bool:
    owner = written.value
    if isinstance(owner, ast.Attribute) and owner.attr == "statistics":
        return written.attr in OF_STATISTICS
    return written.attr in FIELDS and not _is_self(owner)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_no_other_module_writes_to_a_request() -> None:
    found = {
        str(path.relative_to(PACKAGE)): sorted(set(writes(path.read_text())))
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "runtime" / "state.py"
    }
    assert {path: written for path, written in found.items() if written} == {}


def test_a_write_would_be_seen() -> None:
    for line in (
        "segment.state.phase = Phase.DECODE",
        "state.num_prefilled += 1",
        "other.row, state.anchor_id = 1, 2",
        "state.statistics.draft_ms += ms",
        "state.generated_ids.append(token)",
        "chunk.state.words[0] = 0",
        "state.statistics.record_step(num_proposed=1)",
    ):
        assert list(writes(line)), line
