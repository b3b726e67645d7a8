"""`convert`: what a form can hold is read back the same, and what it cannot hold is refused by the key that decides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.drafters.writing import Form
from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.checkpoints.target import read_target
from dspark_trt.cli import app
from dspark_trt.errors import CheckpointError, RecipeError
from tests.support.drafter_dialects import DRAFT_IDS, write_dialect
from tests.support.factories import write_target
from tests.unit.checkpoints.test_drafter_dialects import MIXED, SLIDING, YARN

LEGACY = {"sample_from_anchor": None, "speculators_config": None}
CASES: dict[str, tuple[str, dict[str, Any], Form]] = {
    "speculators to DeepSpec": ("speculators", {"layer_ids": (0, 3), "head_type": "rnn"}, "deepspec"),
    "SpecForge to DeepSpec": ("specforge-nested", {"layer_ids": (1, 3), "rope": YARN}, "deepspec"),
    "own head to DeepSpec": ("deepspec", {"embed_head": "different", "head_type": "gated"}, "deepspec"),
    "bfloat16 to DeepSpec": ("deepspec", {"dtype": "bfloat16"}, "deepspec"),
    "DeepSpec to speculators": ("deepspec", {"layer_ids": (-1, 2)}, "speculators"),
    "DeepSpec DFlash to speculators": ("deepspec-dflash", {}, "speculators"),
    "z-lab to speculators": ("z-lab", {"block_size": 16}, "speculators"),
    "NeMo DFlash to speculators": ("nemo-dflash", {"layer_ids": (1, 3)}, "speculators"),
    "older speculators": ("speculators", {"layer_ids": (1, 3), "extra": LEGACY}, "speculators"),
    "fewer ids, sliding": (
        "speculators",
        {"layer_ids": (1, 4), "draft_ids": DRAFT_IDS, "sliding": MIXED},
        "speculators",
    ),
    "sliding both ways": (
        "speculators",
        {"layer_ids": (1, 4), "sliding": ((SLIDING,) * 3, 6), "extra": {"sliding_window_non_causal": True}},
        "speculators",
    ),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetCheckpoint:
    return read_target(str(target_folder))


def convert(source: Path, target_folder: Path, form: str, output: Path) -> None:
    arguments = ["convert", str(source), "--target", str(target_folder), "--to", form, "--output", str(output)]
    CliRunner().invoke(app, arguments, catch_exceptions=False)


def assert_same(found: DrafterCheckpoint, expected: DrafterCheckpoint) -> None:
    last = 3
    spec = found.spec
    if last not in spec.target_layer_ids:  # where no tap is of the last layer, it says nothing
        spec = replace(spec, is_last_tap_normed=expected.spec.is_last_tap_normed)
    assert replace(spec, num_target_layers=None) == replace(expected.spec, num_target_layers=None)
    assert found.weights.names() == expected.weights.names()
    for name in expected.weights.names():
        np.testing.assert_array_equal(found.weights.array(name), expected.weights.array(name))
    assert (found.draft_ids is None) == (expected.draft_ids is None)
    if expected.draft_ids is not None and found.draft_ids is not None:
        np.testing.assert_array_equal(found.draft_ids, expected.draft_ids)


@pytest.mark.parametrize("case", CASES)
def test_what_a_form_can_hold_is_read_back_the_same(
    case: str, tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    dialect, options, form = CASES[case]
    source = write_dialect(tmp_path / "source", target_folder, dialect, **options)
    convert(source, target_folder, form, tmp_path / "converted")
    assert_same(read_drafter(str(tmp_path / "converted"), target), read_drafter(str(source), target))
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert ("speculators_model_type" in config) == (form == "speculators")


def test_deepspec_form_and_back_is_the_same(tmp_path: Path, target_folder: Path, target: TargetCheckpoint) -> None:
    source = write_dialect(tmp_path / "source", target_folder, "deepspec")
    convert(source, target_folder, "speculators", tmp_path / "there")
    convert(tmp_path / "there", target_folder, "deepspec", tmp_path / "back")
    assert_same(read_drafter(str(tmp_path / "back"), target), read_drafter(str(source), target))


@pytest.mark.parametrize(
    ("dialect", "options", "form", "key"),
    [
        ("z-lab", {}, "deepspec", "sample_from_anchor: the drafter is mask first"),
        ("speculators", {"layer_ids": (1, 3), "draft_ids": DRAFT_IDS}, "deepspec", "draft_vocab_size: .* 14 of 97"),
        ("speculators", {"layer_ids": (1, 3), "sliding": MIXED}, "deepspec", "layer_types, is_causal"),
        ("speculators", {"layer_ids": (1, 4)}, "deepspec", r"last layer \(3\) before its final norm"),
        ("deepspec", {"layer_ids": (1, 3)}, "speculators", r"last layer \(3\) behind its final norm"),
        ("z-lab", {"sliding": MIXED}, "speculators", "counted from each slot"),
        ("z-lab", {"extra": {"is_causal": True}}, "speculators", "causal without a window"),
    ],
)
def test_what_a_form_cannot_hold_is_refused_and_leaves_nothing(
    tmp_path: Path, target_folder: Path, dialect: str, options: dict[str, Any], form: str, key: str
) -> None:
    source = write_dialect(tmp_path / "source", target_folder, dialect, **options)
    with pytest.raises(CheckpointError, match=key):
        convert(source, target_folder, form, tmp_path / "converted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_wrong_options_of_convert_are_refused(tmp_path: Path, target_folder: Path) -> None:
    with pytest.raises(RecipeError, match="--to: expected one of deepspec, speculators, medusa, vllm, found 'gguf'"):
        convert(tmp_path, target_folder, "gguf", tmp_path / "converted")
    with pytest.raises(RecipeError, match=r"--output: .* is there already"):
        convert(tmp_path, target_folder, "deepspec", tmp_path)
