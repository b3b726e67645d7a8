"""calibration.json: what is saved is loaded, and what is no calibration is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.calibration.file import load_calibration, neutral
from dspark_trt.contract.calibration import Calibration
from dspark_trt.errors import ManifestError


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    neutral(3).save(tmp_path / "calibration.json")
    loaded = load_calibration(tmp_path / "calibration.json", gamma=3)
    assert loaded == neutral(3)
    assert loaded.calibration == Calibration.from_temperatures([1.0] * 3)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"greedy": {"slopes": [1.0, -1.0], "offsets": [0.0, 0.0]}}, "greedy.slopes.1"),
        ({"greedy": {"slopes": [1.0, 0.0], "offsets": [0.0, 0.0]}}, "greedy.slopes.1"),
        ({"sampled": {"slopes": [1.0, 1.0], "offsets": [0.0, float("nan")]}}, "sampled.offsets.1"),
        ({"sampled": {"slopes": [1.0], "offsets": [0.0]}}, "one number a slot"),
        ({"survival": [0.5]}, "one number a slot"),
        ({"survival": [1.5, 0.1]}, "survival.0"),
        ({"temperatures": [1.0, float("inf")]}, "temperatures.1"),
        ({"kind": "guessed"}, "kind"),
        ({"schema_version": 2}, "schema_version"),
        ({"more": 1}, "more"),
    ],
)
def test_nonsense_is_refused_and_named(change: dict[str, Any], found: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(json.loads(neutral(2).model_dump_json()) | change))
    with pytest.raises(ManifestError, match=r"is no calibration .*run `dspark-trt calibrate` again") as raised:
        load_calibration(path)
    assert found in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe\x00"])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_bytes(content)
    with pytest.raises(ManifestError, match="is no calibration"):
        load_calibration(tmp_path / "calibration.json")


def test_a_missing_file_and_another_drafters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no calibration at"):
        load_calibration(tmp_path / "calibration.json")
    neutral(2).save(tmp_path / "calibration.json")
    with pytest.raises(ManifestError, match="expected 7 slots, found 2"):
        load_calibration(tmp_path / "calibration.json", gamma=7)
