"""A server prices by a table of its own machine: one from elsewhere is measured again, beside the build."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_trt.building.finished import read_finished
from dspark_trt.building.reprofile import differences, keep_table, own_table, reprofile
from dspark_trt.deployment import load_deployment
from dspark_trt.server.options import ServeOptions
from dspark_trt.server.run_folder import RunFolder
from dspark_trt.server.step_table import step_table_for
from dspark_trt.steptable.table import StepTable
from tests.support.tiny_build import make_tiny_build


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_build(tmp_path_factory.mktemp("tiny"), max_seq_len=64)


@pytest.fixture
def from_elsewhere(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build, its table measured on another processor; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copied = Path(shutil.copytree(built, tmp_path / "build"))
    with monkeypatch.context() as there:
        there.setattr("dspark_trt.machine.cpu.cpu_model", lambda: "another")
        reprofile(copied)
    return copied


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_table_of_this_machine_is_served_as_it_is(built: Path) -> None:
    events: list[str] = []
    assert step_table_for(built, ServeOptions(), events.append).as_json() == own_table(built).as_json()
    assert events == []


def test_table_from_elsewhere_is_measured_again_and_the_build_is_not_written_to(
    from_elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    summary, _ = read_finished(from_elsewhere)
    before, events = listing(from_elsewhere), []
    table = step_table_for(from_elsewhere, ServeOptions(step_table_budget_s=5), events.append)
    assert differences(table, summary.recipe, from_elsewhere) == []
    assert listing(from_elsewhere) == before
    assert "another" in events[0]
    assert "within about 5 s" in events[0]
    assert "measured in" in events[1]
    # a busy machine leaves doubts, and then nothing is kept
    table = replace(table, provenance={**table.provenance, "doubts": []})
    keep_table(from_elsewhere, summary, table)
    again: list[str] = []
    assert step_table_for(from_elsewhere, ServeOptions(), again.append).as_json() == table.as_json()
    assert [("beside it" in event) for event in again] == [True]
    assert load_deployment(from_elsewhere).step_table.as_json() == table.as_json()
    assert "dspark-trt profile" not in caplog.text


def test_kept_table_of_other_circumstances_or_of_no_sense_does_not_count(
    from_elsewhere: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    summary, _ = read_finished(from_elsewhere)
    keep_table(from_elsewhere, summary, own_table(from_elsewhere))
    (kept,) = (tmp_path / "cache").rglob("*.json")
    for text in (kept.read_text(), "{", "{}"):
        kept.write_text(text)
        caplog.clear()
        assert load_deployment(from_elsewhere).step_table.as_json() == own_table(from_elsewhere).as_json()
        assert f"dspark-trt profile {from_elsewhere}" in caplog.text


def test_table_from_elsewhere_can_be_kept(from_elsewhere: Path) -> None:
    events: list[str] = []
    table = step_table_for(from_elsewhere, ServeOptions(step_table="keep"), events.append)
    assert table.as_json() == own_table(from_elsewhere).as_json()
    assert [(f"dspark-trt profile {from_elsewhere}" in event) for event in events] == [True]


def test_measurement_that_fails_does_not_keep_a_server_from_starting(from_elsewhere: Path) -> None:
    events: list[str] = []
    options = ServeOptions(step_table_budget_s=-1.0, log_format="json")  # refused by the command
    table = step_table_for(from_elsewhere, options, events.append)
    assert table.as_json() == own_table(from_elsewhere).as_json()
    assert "could not be measured" in events[-1]
    assert "--budget" in events[-1]


def test_server_gets_its_table_in_its_private_folder(built: Path) -> None:
    table = replace(own_table(built), provenance={"measured_at": "2001-02-03"})
    folder = RunFolder(built, ServeOptions(), "dspark-test", table)
    try:
        named = folder.path / "step_table.json"
        assert f'string_value: "{named}"' in (folder.repository / "dspark" / "config.pbtxt").read_text()
        assert StepTable.load(named).as_json() == table.as_json()
        assert load_deployment(built, step_table=named).step_table.as_json() == table.as_json()
    finally:
        folder.close()
    assert not folder.path.exists()
