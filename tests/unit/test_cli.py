"""The command line: its public surface, exit codes, one clear message, and what it must not import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dspark_trt.cli import app

BLOCK = "import sys; sys.modules.update(torch=None, onnxruntime=None, tensorrt=None, tensorrt_rtx=None); "
RUN = "from dspark_trt.cli import main; main()"


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, `before` run first."""
    code = f"{before}import sys; sys.argv = ['dspark-trt', *{list(arguments)!r}]; {RUN}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_public_surface_is_pinned() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    surface = {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in commands.items()
    }
    expected = json.loads((Path(__file__).parent / "cli_surface.json").read_text())
    assert surface == expected


@pytest.mark.parametrize(
    "statement",
    [
        "import dspark_trt",
        "import dspark_trt.cli, dspark_trt.commands.doctor, dspark_trt.commands.report",
        "import dspark_trt.building.recipe",
        "import dspark_trt.commands.inspect",
        "import dspark_trt.building.build",
        "import dspark_trt.deployment, dspark_trt.server.serve, dspark_trt.serving.engine_model",
    ],
)
def test_importing_loads_no_engine(statement: str) -> None:
    check = "import sys; print(sorted({'torch', 'onnxruntime', 'tensorrt', 'tensorrt_rtx', 'cuda'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", f"{statement}; {check}"], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_start_of_the_command_line_loads_nothing_heavy() -> None:
    heavy = "{'onnx', 'torch', 'onnxruntime', 'tokenizers', 'huggingface_hub', 'jinja2', 'cuda'}"
    statement = f"import sys, dspark_trt.cli; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_doctor_needs_no_engine() -> None:
    result = run("doctor", "--json", before=BLOCK)
    assert result.returncode == 0, result.stderr
    assert {finding["name"] for finding in json.loads(result.stdout)["findings"]} >= {"python", "onnxruntime", "cpu"}


@pytest.mark.parametrize("command", ["inspect", "generate", "serve"])
def test_directory_that_is_no_build_is_exit_code_4_and_one_message(command: str, tmp_path: Path) -> None:
    options = ["--prompt", "x"] if command == "generate" else []
    result = run(command, str(tmp_path), *options)
    assert result.returncode == 4
    assert result.stderr.count("\n") == 1
    assert "not a finished build" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--output", "x", "--drafter", "d"], "target: Field required"),
        (["build", "--output", "x", "--target", "./no/such/folder", "--drafter", "d"], "does not exist"),
        (["build", "--output", "x", "--target", "t", "--drafter", "d", "--precision", "fp7"], "precision:"),
        (
            ["build", "--output", "x", "--target", "t", "--drafter", "d", "--chat-template-kwargs", "{"],
            "not valid JSON",
        ),
        (["build", "--output", "x", "--target", "t", "--drafter", "d", "--no-such-option"], "No such option"),
    ],
)
def test_wrong_options_are_exit_code_2_without_a_traceback(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "x" / "manifest.json").exists()


def test_missing_engine_package_is_exit_code_3_with_the_install_line(tmp_path: Path) -> None:
    from tests.support.factories import write_drafter, write_target

    target = write_target(tmp_path / "target", vocab_size=320, head_dim=16, tokenizer=True)
    drafter = write_drafter(tmp_path / "drafter", target)
    arguments = ["build", "--target", str(target), "--drafter", str(drafter), "--output", str(tmp_path / "out")]
    result = run(*arguments, "--max-requests", "2", "--max-seq-len", "64", "--max-batch-tokens", "32", before=BLOCK)
    assert result.returncode == 3
    assert "pip install" in result.stderr
    assert "Traceback" not in result.stderr


def test_refusal_of_the_operating_system_is_one_message_without_a_traceback() -> None:
    failing = "import dspark_trt.commands.doctor as doctor; doctor.examine = lambda: open('/'); "
    result = run("doctor", before=failing)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "Is a directory" in result.stderr


def test_build_of_a_quantised_engine_says_what_that_means_for_greedy_text(tmp_path: Path) -> None:
    from tests.support.factories import write_drafter, write_target

    target = write_target(tmp_path / "target", vocab_size=320, head_dim=16, tokenizer=True)
    drafter = write_drafter(tmp_path / "drafter", target)
    arguments = ["--target", str(target), "--drafter", str(drafter), "--output", str(tmp_path / "out")]
    limits = ["--max-requests", "2", "--max-seq-len", "64", "--max-batch-tokens", "32"]
    form = ["--draft-vocab", "all", "--drafter-precision", "int8", "--markov-top-n", "0"]  # nothing to choose
    result = run("build", *arguments, *limits, *form, "--precision", "int8")
    assert result.returncode == 0, result.stderr
    assert "int8: 8-bit weights" in result.stdout
    assert "greedy output is stable" in result.stdout
    assert re.search(r"\d+ of 29 Linear layers read activations of 16 bits", result.stdout)
