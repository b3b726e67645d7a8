"""`generate --input`: one line of results for each line of prompts, a failed one failing alone, resumed where it
stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dspark_trt.cli import app
from dspark_trt.commands.prompt_file import unfinished
from dspark_trt.errors import RequestError

OPTIONS = ["--max-tokens", "6", "--ignore-eos"]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def generate(output: Path, prompts: Path, results: Path, *options: str) -> tuple[str, dict[int, Any]]:
    command = ["generate", str(output), "--input", str(prompts), "--output", str(results), *OPTIONS, *options]
    said = CliRunner().invoke(app, command, catch_exceptions=False)
    assert said.exit_code == 0, said.output
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    by_number = {line["line"]: line for line in lines}
    assert len(by_number) == len(lines)
    return said.stdout, by_number


def test_every_prompt_gets_its_line_and_a_failed_one_fails_alone(output: Path, tmp_path: Path) -> None:
    prompts = write(
        tmp_path / "in",
        {"prompt": "a b"},
        {"prompt": "a", "max_tokens": 3},
        "not json",
        "",
        {"prompt": "a", "temperature": -1},
        {"prompt": "a", "colour": "red"},
        {"prompt": "x " * 400},
        {"prompt": ""},
        {"messages": [{"role": "user", "content": "a"}], "seed": 4, "temperature": 1.5},
    )
    said, results = generate(output, prompts, tmp_path / "out")
    assert "3 generated, 5 failed" in said
    assert [len(results[number]["token_ids"]) for number in (1, 2, 9)] == [6, 3, 6]
    errors = {number: line["error"] for number, line in results.items() if "error" in line}
    assert set(errors) == {3, 5, 6, 7, 8}
    assert errors[3].startswith("not valid JSON")
    assert errors[5].startswith("temperature: expected a number in [0, 100], found -1")
    assert errors[6].startswith("colour: is no field of a request")
    assert "at most 64 fit" in errors[7]
    assert errors[8].startswith("prompt: expected a text that is not empty")


def test_second_run_keeps_what_is_finished_and_tries_again_what_failed(output: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "in", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}, "broken")
    _, first = generate(output, prompts, tmp_path / "out")
    lines = (tmp_path / "out").read_text().splitlines()
    finished = [line for line in lines if json.loads(line)["line"] in (1, 4)]
    (tmp_path / "out").write_text("\n".join([*finished, '{"line": 2, "text": "torn'][: len(finished) + 1]))
    write(prompts, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}, {"prompt": "d"})
    said, second = generate(output, prompts, tmp_path / "out")
    assert "3 generated, 1 kept" in said
    assert second[1] == first[1]
    assert [second[number]["token_ids"] for number in (2, 3)] == [first[number]["token_ids"] for number in (2, 3)]
    assert "error" not in second[4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "none", "--output", "out"], "--input none cannot be read"),
        (["--input", "in", "--output", "in"], "is the file of the prompts"),
        (["--input", "in", "--output", "letter"], "line 1 is no result"),
        (["--input", "empty", "--output", "out"], "no prompt in it"),
        (["--input", "in", "--output", "out", "--prompt", "a"], "exclude each other"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_an_engine_opens(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", {"prompt": "a"})
    write(tmp_path / "letter", "Dear Sir", "Yours")
    (tmp_path / "empty").touch()
    with pytest.raises(RequestError, match=message):
        CliRunner().invoke(app, ["generate", "no-build", *arguments], catch_exceptions=False)
    assert (tmp_path / "letter").read_text().startswith("Dear Sir")


def test_prompt_comes_from_standard_input(output: Path) -> None:
    command = ["generate", str(output), "--json", *OPTIONS]
    piped = CliRunner().invoke(app, command, input="a b\n", catch_exceptions=False)
    given = CliRunner().invoke(app, [*command, "--prompt", "a b"], catch_exceptions=False)
    assert json.loads(piped.stdout)["token_ids"] == json.loads(given.stdout)["token_ids"]


def test_limit_of_a_request_holds_under_every_scheduler(output: Path) -> None:
    command = ["generate", str(output), "--json", "--prompt", "a b", "--scheduler", "fixed:3", *OPTIONS]
    for options, limit in (([], 3), (["--max-verify-len", "1"], 1), (["--no-draft"], 0)):
        result = json.loads(CliRunner().invoke(app, [*command, *options], catch_exceptions=False).stdout)
        assert max(result["verify_lens"]) == limit


def test_system_message_goes_through_the_chat_template(output: Path) -> None:
    def length(*options: str) -> int:
        command = ["generate", str(output), "--json", "--prompt", "a", "--max-tokens", "1", *options]
        return int(json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)["num_prompt_tokens"])

    assert length("--system", "be brief") > length("--chat") > length()


def test_a_line_separator_inside_a_prompt_ends_no_line(tmp_path: Path) -> None:
    """U+2028 may stand unescaped in a JSON string; Python's splitlines would cut there."""
    prompts = tmp_path / "in"
    prompts.write_text('{"prompt": "a\u2028b"}\n{"prompt": "c"}\n', encoding="utf-8")
    assert [number for number, _ in unfinished(prompts, tmp_path / "out").lines] == [1, 2]
