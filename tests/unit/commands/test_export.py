"""`export`: our files, read back the way the engines that they are for read them."""

from __future__ import annotations

import bisect
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from dspark_trt.cli import app
from dspark_trt.errors import RecipeError
from dspark_trt.steptable.additive import AdditiveCost, fit_additive
from dspark_trt.steptable.table import StepTable

CONTEXT = 32


def export(folder: Path, engine: str, output: Path, *options: str) -> Result:
    arguments = ["export", str(folder), "--for", engine, "--output", str(output), "--context-tokens", str(CONTEXT)]
    result = CliRunner().invoke(app, [*arguments, *options])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def clamped(probes: list[int], values: list[float], at: float) -> float:
    """Linear between probes, the outermost value beyond them."""
    if at <= probes[0]:
        return values[0]
    if at >= probes[-1]:
        return values[-1]
    right = bisect.bisect_right(probes, at)
    share = (at - probes[right - 1]) / (probes[right] - probes[right - 1])
    return values[right - 1] * (1 - share) + values[right] * share


def check_axis(probes: list[Any], values: list[Any]) -> None:
    assert len(probes) == len(values) >= 2
    assert all(type(each) is int for each in probes)
    assert probes == sorted(set(probes))
    assert all(type(each) is float for each in values)


def read_as_sglang(folder: Path, num_requests: int, num_drafts: int) -> float:
    """Seconds of a step. The form is told by the text of a key; every number has a type of its own."""
    text = (folder / "cost_table.json").read_text()
    assert '"bias_seconds"' in text
    table = json.loads(text)
    assert table["bias_seconds"] > 0
    check_axis(table["bs_probes"], table["alpha_seconds"])
    check_axis(table["m_probes"], table["theta_seconds"])
    alpha = clamped(table["bs_probes"], table["alpha_seconds"], num_requests)
    return table["bias_seconds"] + alpha + clamped(table["m_probes"], table["theta_seconds"], num_requests + num_drafts)


def read_as_tensorrt_llm(folder: Path, num_requests: int, num_drafts: int) -> float:
    """Milliseconds of a step; unknown keys but `_meta` would be refused."""
    table = json.loads((folder / "cost_table.json").read_text())
    prices = {"token_counts", "step_time_ms", "fixed_overhead_ms", "batch_sizes", "batch_overhead_ms"}
    assert set(table) == prices | {"minimum_predicted_gain", "_meta"}
    check_axis(table["token_counts"], table["step_time_ms"])
    check_axis(table["batch_sizes"], table["batch_overhead_ms"])
    assert min(table["step_time_ms"]) > 0
    assert min(table["batch_overhead_ms"]) >= 0
    assert table["fixed_overhead_ms"] >= 0
    theta = np.interp(num_requests + num_drafts, table["token_counts"], table["step_time_ms"])
    alpha = np.interp(num_requests, table["batch_sizes"], table["batch_overhead_ms"])
    return float(theta + alpha + table["fixed_overhead_ms"])


def cost_of(folder: Path) -> AdditiveCost:
    calibration = json.loads((folder / "calibration" / "calibration.json").read_text())
    survival = calibration["survival"] or [0.7**slot for slot in range(1, len(calibration["temperatures"]) + 1)]
    table = StepTable.load(folder / "steptable" / "step_table.json")
    ingested = 1 + sum(survival)
    return fit_additive(table, gamma=len(survival), context_tokens=CONTEXT, ingested_tokens=ingested).cost


@pytest.mark.parametrize(("engine", "unit_ms"), [("sglang", 1e3), ("tensorrt-llm", 1.0)])
def test_prices_are_the_sum_in_the_units_of_the_engine(
    engine: str, unit_ms: float, output: Path, tmp_path: Path
) -> None:
    export(output, engine, tmp_path / "files")
    read = {"sglang": read_as_sglang, "tensorrt-llm": read_as_tensorrt_llm}[engine]
    cost = cost_of(output)
    for num_requests, num_drafts in ((1, 0), (1, 3), (3, 4), (4, 12), (400, 4000)):
        expected = cost.step_ms(np.array([num_requests]), np.array([num_requests + num_drafts]))[0]
        assert read(tmp_path / "files", num_requests, num_drafts) * unit_ms == pytest.approx(expected)


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_temperatures_are_those_of_the_build_and_can_be_imported_again(
    engine: str, output: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(output, tmp_path / "copy"))
    temperatures = [1.5 + 0.1 * at for at in range(len(json.loads(calibration_of(folder))["temperatures"]))]
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"temperatures": temperatures}))
    CliRunner().invoke(app, ["calibrate", str(folder), "--import", str(given)], catch_exceptions=False)
    export(folder, engine, tmp_path / "files")
    written = json.loads((tmp_path / "files" / "temperatures.json").read_text())
    assert written["temperatures"] == temperatures
    if engine == "tensorrt-llm":
        assert written["sts_temperatures"] == temperatures
    assert (type(written["dataset"]), type(written["num_samples"])) == (str, int)
    assert all(isinstance(each, list) for each in (written["ece_before"], written["ece_after"]))
    back = ["calibrate", str(folder), "--import", str(tmp_path / "files" / "temperatures.json")]
    CliRunner().invoke(app, back, catch_exceptions=False)
    assert json.loads(calibration_of(folder))["temperatures"] == temperatures


def calibration_of(folder: Path) -> str:
    return (folder / "calibration" / "calibration.json").read_text()


def test_tensorrt_llm_is_started_with_keys_of_its_speculative_config(output: Path, tmp_path: Path) -> None:
    export(output, "tensorrt-llm", tmp_path / "files")
    config = yaml.safe_load((tmp_path / "files" / "serve.yaml").read_text())["speculative_config"]
    gamma = len(json.loads(calibration_of(output))["temperatures"])
    assert (config["decoding_type"], config["max_draft_len"]) == ("DSpark", gamma)
    assert Path(config["speculative_model"], "config.json").is_file()
    for key in ("confidence_cost_table_path", "confidence_calibration_path"):
        assert Path(config[key]).is_file()
    assert config["enable_confidence_scheduling"] is True
    start = (tmp_path / "files" / "serve.sh").read_text()
    assert f"trtllm-serve {output.parent / 'target'} --config {tmp_path / 'files' / 'serve.yaml'}" in start
    assert os.access(tmp_path / "files" / "serve.sh", os.X_OK)


def test_sglang_is_started_in_the_mode_that_reads_the_table(output: Path, tmp_path: Path) -> None:
    export(output, "sglang", tmp_path / "files")
    start = (tmp_path / "files" / "serve.sh").read_text()
    assert "export SGLANG_RAGGED_VERIFY_MODE=compact\n" in start
    gamma = len(json.loads(calibration_of(output))["temperatures"])
    assert f"--speculative-dspark-block-size {gamma} " in start
    assert f"--speculative-dspark-sps-table-path {tmp_path / 'files' / 'cost_table.json'}" in start


def test_error_of_the_sum_is_printed_and_given_as_json(output: Path, tmp_path: Path) -> None:
    assert "of the step table, median" in export(output, "sglang", tmp_path / "files").stdout
    found = json.loads(export(output, "sglang", tmp_path / "files", "--json").stdout)
    assert 0 <= found["fit"]["median_error"] <= found["fit"]["max_error"]


def test_folder_of_something_else_is_left_alone(output: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(RecipeError, match=r"holds \['notes.txt'\], which no export wrote"):
        export(output, "sglang", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("keep")
    with pytest.raises(RecipeError, match="is a file"):
        export(output, "sglang", tmp_path / "file")
