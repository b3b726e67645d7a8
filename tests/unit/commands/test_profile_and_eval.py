"""`profile` renews one stage of a finished build; `eval` counts what drafts are worth."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark_trt.building.finished import check_servable, read_finished
from dspark_trt.building.reprofile import differences
from dspark_trt.cli import app
from dspark_trt.deployment import load_deployment
from dspark_trt.steptable.table import StepTable

TABLE = Path("steptable") / "step_table.json"


@pytest.fixture
def copied(output: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(output, tmp_path / "copy"))


def test_profile_renews_the_step_table_alone_and_keeps_the_chain(copied: Path) -> None:
    before = {name: manifest.created for name, manifest in read_finished(copied)[1].items()}
    old = (copied / TABLE).read_text()
    result = CliRunner().invoke(app, ["profile", str(copied)])
    assert result.exit_code == 0, result.output
    assert (copied / TABLE).read_text() != old
    check_servable(copied)
    after = read_finished(copied)[1]
    assert {name for name in before if name != "steptable"} == {
        name for name, manifest in after.items() if manifest.created == before[name] and name != "steptable"
    }


def test_profile_writes_a_table_elsewhere_and_leaves_the_build_alone(output: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    elsewhere = tmp_path / "table.json"
    result = CliRunner().invoke(app, ["profile", str(output), "--output", str(elsewhere), "--budget", "1", "--json"])
    assert result.exit_code == 0, result.output
    provenance = StepTable.load(elsewhere).provenance
    assert json.loads(result.stdout.splitlines()[-1]) == {"provenance": provenance}
    assert {"doubts", "spread_of_repeats", "load_average", "measured_at"} <= set(provenance)
    assert before == {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    refused = CliRunner().invoke(app, ["profile", str(output), "--budget", "1"])
    assert "--output" in str(refused.exception)


def test_table_of_other_circumstances_is_said_with_the_command(
    output: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING, "dspark_trt"):
        load_deployment(output)
        assert "dspark-trt profile" not in caplog.text
        monkeypatch.setattr("dspark_trt.machine.cpu.cpu_model", lambda: "another")
        load_deployment(output)
    assert f"dspark-trt profile {output}" in caplog.text
    assert "another" in caplog.text


@pytest.mark.parametrize("name", ["host", "num_threads", "backend", "versions"])
def test_every_circumstance_counts(name: str, output: Path) -> None:
    table = StepTable.load(output / TABLE)
    recipe = read_finished(output)[0].recipe
    assert differences(table, recipe, output) == []
    odd = replace(table, provenance={**table.provenance, name: "another"})
    assert [each.split(":")[0] for each in differences(odd, recipe, output)] == [name]


def test_every_fact_about_the_host_counts(output: Path) -> None:
    table = StepTable.load(output / TABLE)
    recipe = read_finished(output)[0].recipe
    host = table.provenance["host"]
    assert set(host) == {"cpu", "num_cores", "machine", "instructions"}
    for name in host:
        odd = replace(table, provenance={**table.provenance, "host": {**host, name: "another"}})
        assert differences(odd, recipe, output)


def test_version_of_a_package_that_does_not_run_the_engine_does_not_count(output: Path) -> None:
    """Tables of older builds name every package that might have."""
    table = StepTable.load(output / TABLE)
    recipe = read_finished(output)[0].recipe
    versions = {**table.provenance["versions"], "torch": "1.0"}
    assert differences(replace(table, provenance={**table.provenance, "versions": versions}), recipe, output) == []
    versions = {**versions, "onnxruntime": "0.1"}
    assert differences(replace(table, provenance={**table.provenance, "versions": versions}), recipe, output)


def test_eval_counts_conditional_acceptance(output: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "set.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "bc", "d")))
    options = ["--prompts", str(prompts), "--max-tokens", "16", "--temperature", "1", "--json"]
    result = CliRunner().invoke(app, ["eval", str(output), *options])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["sets"]
    assert (found["name"], found["num_prompts"]) == ("set", 3)
    conditional, prefix = found["conditional_acceptance"], found["prefix_acceptance"]
    assert conditional[0] == prefix[0]
    assert all(whole >= part for whole, part in zip(conditional, prefix, strict=True) if whole is not None)
    assert found["accepted_len"] >= 1
