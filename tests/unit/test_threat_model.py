"""docs/threat_model.md: every finding of the review has a test, and every test that the page names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dspark_trt.server.arguments import server_arguments
from dspark_trt.server.options import ServeOptions

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "threat_model.md").read_text()
SERVING = (REPOSITORY / "docs" / "serving.md").read_text()
NUM_FINDINGS = 19


def names_in(path: str) -> set[str]:
    parsed = ast.parse((REPOSITORY / "tests" / path).read_text())
    return {node.name for node in parsed.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_finding_names_a_test_that_there_is() -> None:
    rows = re.findall(r"^\| S(\d+) \| [^|]+ \| (.+) \|$", PAGE, flags=re.MULTILINE)
    assert {int(number) for number, _ in rows} == set(range(1, NUM_FINDINGS + 1))
    for number, guards in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", guards)
        assert len(named) == len(guards.split(", ")), f"S{number}"
        for path, name in named:
            assert name in names_in(path), f"S{number}: {path} has no {name}"


def test_every_file_of_tests_that_the_page_names_is_there() -> None:
    for folder in re.findall(r"`((?:unit|triton|engine|fuzz)/(?:[\w/]+)?)`", PAGE):
        assert (REPOSITORY / "tests" / folder).is_dir(), folder
    for path, keyword in re.findall(r"`([\w/]+\.py)`(?: \(`(\w+)`\))?", PAGE):
        assert not keyword or any(keyword in name for name in names_in(path)), f"{path}: nothing of {keyword}"
        assert names_in(path)


@pytest.mark.parametrize("name", ["http-address", "grpc-address", "metrics-address"])
def test_page_names_the_options_that_a_plain_tritonserver_lacks(name: str) -> None:
    """S8: started by hand it is open to all; what `serve` adds is what to add."""
    assert f"--{name}=127.0.0.1" in SERVING
    for argument in server_arguments(ServeOptions(), "KEY", "prefix"):
        option, _, value = argument.partition("=")
        if "restricted" in option:
            assert f"{option}={value.split(':')[0]}:NAME=KEY" in SERVING
