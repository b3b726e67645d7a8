"""Calibrations that others made, in the shapes in which their engines read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.calibration.file import load_calibration, neutral
from dspark_trt.calibration.given import read_given
from dspark_trt.errors import RecipeError

TEMPERATURES = [0.75, 1.0, 2.0]
OTHERS = [0.1, 0.1, 0.1]


def write(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    "data",
    [
        {"sts_temperatures": TEMPERATURES, "temperatures": OTHERS, "ece_before": [0.1]},
        {"temperatures": TEMPERATURES, "dataset": "x", "num_samples": 3},
        {"confidence_temperatures": TEMPERATURES, "block_size": 3},
        {"profile": {"latency_ms": {"1": 1.0}, "confidence_temperatures": TEMPERATURES}},
        {"batch_stats": {}, "hardware_profile": {"confidence_temperatures": TEMPERATURES}},
    ],
    ids=["TensorRT-LLM", "SGLang", "drafter's config.json", "vllm-ascend profile", "vllm-ascend tuner"],
)
def test_logits_are_divided_by_the_temperatures_of_each_form(data: dict[str, Any], tmp_path: Path) -> None:
    found = read_given(write(tmp_path / "sts.json", data), 3)
    assert (found.kind, found.temperatures) == ("imported", tuple(TEMPERATURES))
    assert found.provenance["imported_from"] == "sts.json"
    logits = np.array([[-1.0, 0.5, 3.0]], dtype=np.float32)
    for is_greedy in (True, False):
        confidence = found.calibration.confidence(logits, np.array([is_greedy]))
        np.testing.assert_allclose(confidence, 1 / (1 + np.exp(-logits / TEMPERATURES)), rtol=1e-6)
    found.save(tmp_path / "calibration.json")
    assert load_calibration(tmp_path / "calibration.json", gamma=3) == found


def test_file_of_ours_keeps_its_lines_and_says_where_it_came_from(tmp_path: Path) -> None:
    lines = {"slopes": [0.5, 1.5, 1.0], "offsets": [0.1, -0.2, 0.0]}
    ours = json.loads(neutral(3).model_dump_json()) | {"kind": "fitted", "greedy": lines, "survival": [0.6, 0.4, 0.2]}
    found = read_given(write(tmp_path / "ours.json", ours), 3)
    assert (found.kind, found.greedy.offsets, found.survival) == ("imported", (0.1, -0.2, 0.0), (0.6, 0.4, 0.2))
    assert found.provenance == {"imported_from": "ours.json", "kind": "fitted", "provenance": {}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"temperatures": TEMPERATURES[:2]}, "expected 3 slots, found 2"),
        (json.loads(neutral(7).model_dump_json()), "expected 3 slots, found 7"),
        ({"temperatures": [1.0, 0.0, 1.0]}, "expected one finite number above 0"),
        ({"temperatures": [1.0, True, 1.0]}, "expected one finite number above 0"),
        ({"temperatures": [1.0, "1", 1.0]}, "expected one finite number above 0"),
        ({"temperatures": [1.0, float("nan"), 1.0]}, "expected one finite number above 0"),
        ({"temperatures": 1.0}, "expected one finite number above 0"),
        ({"temperature": [1.0]}, r"expected a build's calibration.json or a list.*found keys \['temperature'\]"),
        (json.loads(neutral(3).model_dump_json()) | {"greedy": {}}, "greedy.slopes: Field required"),
        ([1.0], "expected a JSON object, found list"),
    ],
)
def test_other_files_are_refused_and_say_why(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        read_given(write(tmp_path / "sts.json", data), 3)
    assert str(tmp_path / "sts.json") in str(raised.value)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        read_given(tmp_path / "none.json", 3)
    (tmp_path / "broken.json").write_bytes(b"\xff{")
    with pytest.raises(RecipeError, match="not valid JSON"):
        read_given(tmp_path / "broken.json", 3)
