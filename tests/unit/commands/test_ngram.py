"""Every command on a build without a drafter: it works, or says in one message why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dspark_trt.calibration.file import CALIBRATION_FILE, load_calibration
from dspark_trt.cli import app
from dspark_trt.errors import RecipeError


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Short ones that repeat themselves."""
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "kind": "chat"}) + "\n" for text in ("ababab", "xyxyx", "ccc")))
    return str(path)


def test_inspect_tells_what_drafts(ngram_build: Path) -> None:
    shown = run("inspect", str(ngram_build)).stdout
    assert "ngram (no model)" in shown
    assert "up to 5 drafts copied from each request's own text" in shown
    assert "draft 1" not in shown
    assert run_json("inspect", str(ngram_build))["drafter"] == {"kind": "ngram", "gamma": 5}


def test_generate_drafts_by_default_and_says_how_many_were_accepted(ngram_build: Path) -> None:
    options = ["--prompt", "abcabcabc", "--max-tokens", "40", "--temperature", "0", "--scheduler", "fixed"]
    found = run_json("generate", str(ngram_build), *options)
    assert found["num_drafts_verified"] > 0
    assert len(found["token_ids"]) == 1 + found["num_steps"] + found["num_drafts_accepted"]


def test_verify_passes_in_its_default_modes(ngram_build: Path) -> None:
    found = run_json("verify", str(ngram_build), "--prompts", "1", "--samples", "2", "--max-tokens", "8")
    assert found["has_passed"]
    assert sum(mode["num_drafts_verified"] for mode in found["modes"]) > 0


def test_bench_measures_its_default_modes(ngram_build: Path, prompts: str) -> None:
    options = ["--quick", "--concurrency", "1", "--repeats", "1", "--max-tokens", "8", "--prompts", prompts]
    found = run_json("bench", str(ngram_build), *options, "--kinds", "mixed")
    assert [each["mode"] for each in found["summaries"]] == ["off", "fixed:5", "auto"]


def test_eval_counts_acceptance_of_copied_drafts(ngram_build: Path, prompts: str) -> None:
    (found,) = run_json("eval", str(ngram_build), "--prompts", prompts, "--max-tokens", "32")["sets"]
    assert len(found["conditional_acceptance"]) == 5
    assert found["accepted_len"] > 1


@pytest.fixture
def copied(ngram_build: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ngram_build, tmp_path / "copy"))


def test_calibrate_shows_a_line_a_match_length_and_takes_its_own_file_back(
    copied: Path, prompts: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    options = ["--prompts", prompts, "--max-tokens", "24", "--report", str(report)]
    lines = run("calibrate", str(copied), *options).stdout.splitlines()
    assert "of 3 prompts" not in lines[0]
    assert "lookups in the answers to 3 prompts" in lines[0]
    assert [line.split()[0] for line in lines[-16:]] == [str(length) for length in range(1, 17)]
    assert "match length" in report.read_text()
    measured = copied / "calibration" / CALIBRATION_FILE
    given, expected = Path(shutil.copy(measured, tmp_path / "given.json")), load_calibration(measured).lookup
    assert "imported from given.json" in run("calibrate", str(copied), "--import", str(given)).stdout
    assert load_calibration(measured).lookup == expected
    given.write_text(json.dumps({"temperatures": [1.0] * 5}))
    with pytest.raises(RecipeError, match=r"--import: .*expected how often copied drafts are accepted"):
        run("calibrate", str(copied), "--import", str(given))


def test_profile_measures_the_table_again(copied: Path) -> None:
    before = (copied / "steptable" / "step_table.json").read_text()
    run("profile", str(copied))
    assert (copied / "steptable" / "step_table.json").read_text() != before


def test_simulate_asks_for_acceptance_and_then_prices_free_drafts(ngram_build: Path) -> None:
    with pytest.raises(RecipeError, match=r"--acceptance: expected, since neither .* nor a build with drafter ngram"):
        run("simulate", str(ngram_build))
    options = ["--acceptance", ".9,.9,.9", "--concurrency", "1", "--steps", "50"]
    found = run_json("simulate", str(ngram_build), *options)
    assert [each["mode"] for each in found["predictions"]] == ["off", "fixed", "auto"]


@pytest.mark.parametrize("engine", ["tensorrt-llm", "sglang"])
def test_export_is_refused_by_name(ngram_build: Path, tmp_path: Path, engine: str) -> None:
    with pytest.raises(RecipeError, match=rf"was built with drafter ngram, and {engine} asks for a DSpark checkpoint"):
        run("export", str(ngram_build), "--for", engine, "--output", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
