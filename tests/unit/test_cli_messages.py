"""What a newcomer meets: version, help, where options may stand, and one message with the right code for each
mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.conftest import LIMITS
from tests.unit.test_cli import run


def test_version_alone_is_an_answer() -> None:
    result = run("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("dspark-trt ")


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["build", "-h"], ["generate", "-h"], ["chat", "-h"]])
def test_help_has_a_short_name(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: dspark-trt")


def test_shell_completion_is_there() -> None:
    assert "--install-completion" in run("--help").stdout
    shown = subprocess.run(
        [sys.executable, "-m", "dspark_trt"],
        env={**os.environ, "_DSPARK_TRT_COMPLETE": "complete_bash", "COMP_WORDS": "dspark-trt in", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.stdout.strip() == "inspect"


@pytest.mark.parametrize("arguments", [["--verbose", "{}"], ["{}", "--verbose"], ["{}", "--log-level", "info"]])
def test_log_options_stand_before_or_behind_the_command(arguments: list[str], pair: list[str], tmp_path: Path) -> None:
    command = ["build", *pair, *LIMITS, "--output", str(tmp_path / "out"), "--dry-run"]
    words = [word for argument in arguments for word in (command if argument == "{}" else [argument])]
    result = run(*words, "--log-file", str(tmp_path / "log"))
    assert result.returncode == 0, result.stderr
    assert "backend: onnxruntime" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--log-level", "loud"], "--log-level: expected debug, info, warning, error, found 'loud'"),
        (["--log-file", "/no/such/folder/log"], "--log-file /no/such/folder/log: cannot be written (No such file"),
    ],
)
def test_unusable_log_options_are_refused(options: list[str], message: str) -> None:
    result = run("doctor", *options)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_backend_precision_and_reason_are_always_said(pair: list[str], tmp_path: Path) -> None:
    result = run("build", *pair, *LIMITS, "--output", str(tmp_path / "out"))
    assert result.returncode == 0
    assert "backend onnxruntime, precision fp32: found no GPU (" in result.stderr


def test_gpu_that_stays_unused_for_want_of_a_package_is_a_warning(pair: list[str], tmp_path: Path) -> None:
    before = (
        "import sys; sys.modules['cuda.bindings'] = None; import dspark_trt.machine.gpu as gpu; "
        "gpu.has_driver = lambda: True; "
    )
    result = run("build", *pair, *LIMITS, "--output", str(tmp_path / "out"), "--dry-run", before=before)
    assert result.returncode == 0
    said = " ".join(result.stderr.split())
    assert "WARNING" in said
    assert "a GPU stays unused: pip install cuda-bindings" in said


def test_dry_run_prints_the_plan_and_writes_nothing(pair: list[str], tmp_path: Path) -> None:
    command = ["build", *pair, *LIMITS, "--output", str(tmp_path / "out"), "--dry-run"]
    result = run(*command)
    assert result.returncode == 0
    for name in ("target", "drafter", "backend", "limits", "memory", "disk", "time"):
        assert f"\n{name} " in f"\n{result.stdout}"
    assert "KV of all rows" in " ".join(result.stdout.split())
    plan = json.loads(run(*command, "--json").stdout)
    # 2 requests of 64 + 32 positions, float32, K and V: layers x heads x head_dim of both models
    assert plan["kv_bytes"] > 0
    assert plan["kv_bytes"] % (2 * (64 + 32) * 4 * 2 * 16) == 0
    assert list(tmp_path.iterdir()) == []


def test_plan_reads_as_the_transcript_of_the_documentation_does(pair: list[str], tmp_path: Path) -> None:
    """Numbers, units and machines differ; words do not."""
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    recorded = page.partition("--dry-run\n")[2].partition("\n\n")[0]
    printed = run("build", *pair, *LIMITS, "--output", str(tmp_path / "out"), "--dry-run").stdout

    def words(text: str, line: str) -> list[str]:
        (found,) = (each.split() for each in text.splitlines() if each.split()[:1] == [line])
        return [word for word in (each.strip(",:") for each in found) if word.isalpha() and word.islower()]

    for line in ("limits", "scheduler", "memory", "disk"):
        assert words(recorded, line) == words(printed, line), line


def test_drafter_typo_costs_no_look_at_the_target(pair: list[str], tmp_path: Path) -> None:
    command = ["build", "--target", "no-such-owner/no-such-model", "--drafter", "./no/such/drafter", "--output"]
    result = run(*command, str(tmp_path / "out"))
    assert result.returncode == 2
    assert "./no/such/drafter does not exist" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-requests", "0"], "--max-requests: Input should be greater than or equal to 1, found '0'"),
        (["--max-requests", "x"], "--max-requests: Input should be a valid integer"),
        (["--max-seq-len", "100000"], "--max-seq-len 100000 is beyond the"),
        (["--markov-top-n", "320"], "--markov-top-n: expected less than the drafter's vocabulary of 320"),
        (["--scheduler", "fixed:99"], "--scheduler: fixed:99 verifies more drafts than a block has"),
        (["--scheduler", "fast"], "--scheduler: mode: expected one of"),
        (["--draft-vocab", "some"], "--draft-vocab: expected auto, all or a number of tokens >= 1, found 'some'"),
        (["--calibration", "/no/such/file"], "--calibration: /no/such/file cannot be read (No such file"),
        (["--max-batch-tokens", "16", "--max-requests", "32"], "--max-batch-tokens 16 is below max_requests 32"),
        (["--max-requests", "1024", "--max-batch-tokens", "99999999"], "memory: the engines need"),
    ],
)
def test_limits_are_checked_before_anything_is_written(
    options: list[str], message: str, pair: list[str], tmp_path: Path
) -> None:
    result = run("build", *pair, *options, "--output", str(tmp_path / "out"))
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_build_that_no_disk_holds_is_refused(pair: list[str], tmp_path: Path) -> None:
    before = "import shutil; usage = type(shutil.disk_usage('/')); shutil.disk_usage = lambda path: usage(9, 9, 0); "
    result = run("build", *pair, *LIMITS, "--output", str(tmp_path / "out"), before=before)
    assert result.returncode == 2
    assert "disk: the build takes up to" in result.stderr
    assert list(tmp_path.iterdir()) == []


signals = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


def interrupted(patch: str, arguments: list[str], number: signal.Signals) -> tuple[int, str]:
    """Exit status and standard error of a command that gets the signal where `patch` makes it print "here"."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); signal.signal(signal.SIGHUP, "
        "signal.SIG_DFL); import sys, time; wait = lambda *a, **k: (print('here', flush=True), time.sleep(60)); "
        f"{patch}; sys.argv = ['dspark-trt', *{arguments!r}]; from dspark_trt.cli import main; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    return process.returncode, said


@signals
def test_signals_end_a_build_with_a_word_and_nothing_half_written(
    number: signal.Signals, pair: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    patch = "import dspark_trt.building.target_form as form; form.write_target_graph = wait"
    status, said = interrupted(patch, ["build", *pair, *LIMITS, "--output", str(output)], number)
    assert status == 128 + number
    assert said.rstrip().endswith("interrupted")
    assert [path.name for path in output.iterdir() if path.name.endswith(".partial")] == []
    assert (output / "checkpoints").is_dir()


@signals
def test_signals_end_a_generation_with_a_word(number: signal.Signals, built: Path) -> None:
    patch = "from dspark_trt.runtime.loop import DecodingLoop; DecodingLoop.step = wait"
    status, said = interrupted(patch, ["generate", str(built), "--prompt", "a"], number)
    assert (status, said.rstrip().rpartition("\n")[2]) == (128 + number, "interrupted")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheduler", "fixed:99"], "--scheduler: fixed:99 verifies more drafts than a block has"),
        (["--scheduler", "fixed:x"], "--scheduler: expected a number behind fixed:, found 'fixed:x'"),
        (["--scheduler", "off:3"], "--scheduler: off takes no number"),
        (["--scheduler", "best"], "--scheduler: mode: expected one of"),
        (["--address", "fe80::1"], "--address fe80::1: expected an address that does not depend on a link"),
        (["--address", "no.such.host.invalid"], "--address no.such.host.invalid: no address is known for it"),
    ],
)
def test_options_of_serve_are_checked_before_anything_starts(options: list[str], message: str, built: Path) -> None:
    result = run("serve", str(built), *options)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_output_of_the_form_that_no_shell_expands_is_in_the_home_folder(pair: list[str], tmp_path: Path) -> None:
    before = f"import os; os.environ['HOME'] = {str(tmp_path)!r}; os.chdir({str(tmp_path)!r}); "
    result = run("build", *pair, *LIMITS, "--output=~/x", before=before)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "x" / "manifest.json").exists()
    assert not (tmp_path / "~").exists()


def test_input_that_may_not_be_read_is_not_told_to_make_room(built: Path, tmp_path: Path) -> None:
    failing = (
        "import dspark_trt.commands.doctor as doctor\ndef fail(): raise PermissionError(13, 'Permission "
        "denied', '/a')\ndoctor.examine = fail; "
    )
    result = run("doctor", before=failing)
    assert result.returncode == 2
    assert "Permission denied: '/a'; give this user the right to it" in result.stderr
    assert "make room" not in result.stderr


def test_full_disk_is_told_to_make_room() -> None:
    failing = (
        "import dspark_trt.commands.doctor as doctor\ndef fail(): raise OSError(28, 'No space left on device', "
        "'/a')\ndoctor.examine = fail; "
    )
    assert "make room" in run("doctor", before=failing).stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens: expected an integer >= 1, found 0\n"),
        (["--temperature", "-1"], "--temperature: expected a number in [0, 100], found -1.0\n"),
        (["--max-verify-len", "-1"], "--max-verify-len: expected an integer >= 0, found -1\n"),
        (["--no-draft", "--max-verify-len", "2"], "--draft/--no-draft: no draft and a max_verify_len above 0 exclude"),
        (["--logit-bias", "a=b"], "--logit-bias: expected TOKEN_ID=BIAS, e.g. 42=-100, found 'a=b'"),
        (["--scheduler", "threshold"], "--scheduler: threshold: expected with mode 'threshold'"),
        (["--input", "a"], "--input and --output go together"),
    ],
)
def test_generate_names_options_and_not_fields(options: list[str], message: str, built: Path) -> None:
    result = run("generate", str(built), "--prompt", "a", *options)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "send the request again" not in result.stderr
