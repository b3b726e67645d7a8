"""docs/serving.md names every field, output and metric that there is."""

from __future__ import annotations

import re
from pathlib import Path

from dspark_trt.packaging.signature import ENGINE_FIELDS, ENGINE_OUTPUTS, PREPROCESSING_FIELDS
from dspark_trt.serving import metric_families

WORDS = set(re.findall(r"`(\w+)`", (Path(__file__).parents[3] / "docs" / "serving.md").read_text()))


def test_every_field_and_output_is_documented() -> None:
    assert {field.name for field in (*PREPROCESSING_FIELDS, *ENGINE_FIELDS)} <= WORDS
    assert {tensor.name for tensor in ENGINE_OUTPUTS} <= WORDS


def test_every_metric_is_documented_and_no_other() -> None:
    exported = set(re.findall(r'"(dspark_\w+)"', Path(metric_families.__file__).read_text()))
    assert {word for word in WORDS if word.startswith("dspark_")} == exported
