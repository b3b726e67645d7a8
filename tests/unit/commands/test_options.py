"""Options are declared once: help, recipe keys, documentation and requests come from the same fields."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from dspark_trt.building.option import default_of, flag_of, options_table
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.cli import app
from dspark_trt.commands.generation_options import _SAME_NAMES, GenerationOptions, generation_options
from dspark_trt.errors import RequestError
from dspark_trt.runtime.request import SamplingParams

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def help_of(command: str) -> str:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    return "".join(result.stdout.split())  # a terminal breaks lines at hyphens, too


@pytest.mark.parametrize(("command", "model"), [("build", BuildRecipe), ("generate", GenerationOptions)])
def test_help_has_every_field_with_its_description_and_its_default(command: str, model: type[BaseModel]) -> None:
    """`[default: …]` was taken for markup once, and eaten."""
    shown = help_of(command)
    for name, field in model.model_fields.items():
        assert flag_of(name, field).split("/")[0] in shown
        assert "".join((field.description or "?").split()) in shown
        if default := default_of(field):
            assert f"[default:{''.join(default.split())}]" in shown


def test_table_of_the_documentation_is_that_of_the_recipe() -> None:
    assert "\n".join(options_table(BuildRecipe)) in OPERATIONS.read_text()


def test_request_options_are_those_of_the_runtime() -> None:
    runtime = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    own = {"stop": "stop_strings", "bad_words": "bad_words", "logit_bias": "logit_bias", "log_probs": "num_log_probs"}
    assert set(own.values()) | set(_SAME_NAMES) <= set(runtime)
    for name in _SAME_NAMES:
        default = GenerationOptions.model_fields[name].default
        assert default is None or default == runtime[name], name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": "many"}, r"^max_tokens: .*valid integer.*found 'many'"),
        ({"max_token": "1"}, r"^max_token: is no field.*max_tokens"),
        ({"draft": "false", "max_verify_len": "2"}, r"exclude each other"),
        ({"temperature": "x" * 5000}, r"found '[x]+… \(5002 characters\)"),
    ],
)
def test_refusals_name_the_field_and_abridge_the_value(given: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        generation_options(given)
    assert len(str(caught.value)) < 600


def test_no_draft_is_a_verify_limit_of_zero() -> None:
    assert generation_options({"draft": "false"}).verify_limit == 0
    assert generation_options({"max_verify_len": "3"}).verify_limit == 3
    assert generation_options({}).verify_limit is None


def test_help_says_the_same_scheduler_language_everywhere() -> None:
    for command in ("generate", "serve", "chat"):
        assert re.search(r"off\|fixed\|fixed:K\|threshold:C\|early_stop\|lagged_budget\|auto", help_of(command))
