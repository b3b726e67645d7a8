"""`convert` of EAGLE-3 drafters and Medusa heads: what a form can hold is read back the same, and what it cannot hold
is refused by the key that decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.spec import TargetCheckpoint
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError
from tests.support.drafter_dialects import DRAFT_IDS
from tests.support.eagle3_dialects import write_eagle3
from tests.support.factories import write_target
from tests.support.medusa_forms import random_heads, write_medusa, write_vllm_medusa
from tests.unit.checkpoints.test_drafter_writing import assert_same, convert

TAPS = {"target_layer_ids": [0, 1, 2]}
RESIDUAL = {"norm_before_residual": False}
HELD: dict[str, tuple[str, dict[str, Any], str]] = {
    "DeepSpec to itself": ("deepspec", {"layer_ids": (0, 1, 3)}, "deepspec"),
    "DeepSpec to speculators": ("deepspec", {"layer_ids": (-1, 1, 2)}, "speculators"),
    "speculators to DeepSpec": ("speculators", {"layer_ids": (0, 1, 3), "extra": RESIDUAL}, "deepspec"),
    "shared head to speculators": ("deepspec", {"layer_ids": (0, 1), "embed_head": "equal"}, "speculators"),
    "community, fewer ids": ("community", {"layer_ids": (0, 1, 3), "draft_ids": DRAFT_IDS}, "speculators"),
    "community, norms of taps": ("community", {"tap_norm": "each"}, "speculators"),
    "bfloat16": ("community", {"dtype": "bfloat16"}, "speculators"),
    "speculators to itself": (
        "speculators",
        {"tap_norm": "joint", "draft_ids": DRAFT_IDS, "extra": {"norm_output": True}},
        "speculators",
    ),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), family="qwen3")


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetCheckpoint:
    return read_target(str(target_folder))


@pytest.mark.parametrize("case", HELD)
def test_an_eagle3_drafter_is_read_back_the_same(
    case: str, tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    dialect, options, form = HELD[case]
    source = write_eagle3(tmp_path / "source", target_folder, dialect, **options)
    convert(source, target_folder, form, tmp_path / "converted")
    assert_same(read_drafter(str(tmp_path / "converted"), target), read_drafter(str(source), target))


def test_deepspec_form_and_back_is_the_same(tmp_path: Path, target_folder: Path, target: TargetCheckpoint) -> None:
    source = write_eagle3(tmp_path / "source", target_folder, "deepspec", layer_ids=(0, 2))
    convert(source, target_folder, "speculators", tmp_path / "there")
    convert(tmp_path / "there", target_folder, "deepspec", tmp_path / "back")
    assert_same(read_drafter(str(tmp_path / "back"), target), read_drafter(str(source), target))


@pytest.mark.parametrize(
    ("dialect", "options", "form", "key"),
    [
        ("speculators", {"extra": RESIDUAL, "draft_ids": DRAFT_IDS}, "deepspec", r"draft_vocab_size: .* 14 of 97"),
        ("community", {}, "deepspec", "q_norm, k_norm: "),
        ("speculators", {}, "deepspec", "norm_before_residual: "),
        ("speculators", {"extra": RESIDUAL | {"norm_output": True}}, "deepspec", "norm_output: "),
        ("speculators", {"extra": RESIDUAL, "tap_norm": "each"}, "deepspec", "norm_before_fc, fc_norm: "),
        (
            "speculators",
            {"extra": RESIDUAL, "layer_ids": (1, 4)},
            "deepspec",
            r"last layer \(3\) before its final norm",
        ),
        ("deepspec", {"layer_ids": (1, 3)}, "speculators", r"last layer \(3\) behind its final norm"),
        ("dart", {"layer_ids": None, "extra": TAPS}, "speculators", "draft_length: the drafter is DART's"),
        ("dart", {"layer_ids": None, "extra": TAPS}, "deepspec", "draft_length: the drafter is DART's"),
        ("deepspec", {}, "medusa", r"medusa: that form has no place for an EAGLE-3 drafter; use --to deepspec or"),
    ],
)
def test_what_a_form_cannot_hold_of_an_eagle3_drafter_is_refused(
    tmp_path: Path, target_folder: Path, dialect: str, options: dict[str, Any], form: str, key: str
) -> None:
    source = write_eagle3(tmp_path / "source", target_folder, dialect, **({"layer_ids": (0, 1)} | options))
    with pytest.raises(CheckpointError, match=key):
        convert(source, target_folder, form, tmp_path / "converted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


MEDUSA: dict[str, dict[str, Any]] = {
    "own": {},
    "vLLM": {},
    "vLLM without biases": {"has_bias": False},
    "vLLM, one matrix": {"is_shared": True},
    "vLLM, fewer ids": {"token_map": DRAFT_IDS[::-1].copy()},
}


@pytest.mark.parametrize("form", ["medusa", "vllm"])
@pytest.mark.parametrize("case", MEDUSA)
def test_medusa_heads_are_the_same_in_both_forms(
    case: str, form: str, tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    heads = random_heads(target_folder, num_heads=3, num_blocks=2)
    write = write_medusa if case == "own" else write_vllm_medusa
    source = write(tmp_path / "source", heads, **MEDUSA[case])
    if "ids" in case and form == "medusa":
        with pytest.raises(CheckpointError, match=r"truncated_vocab_size: .* 14 of 97 ids"):
            convert(source, target_folder, form, tmp_path / "converted")
        return
    convert(source, target_folder, form, tmp_path / "converted")
    found, expected = (read_drafter(str(tmp_path / folder), target) for folder in ("converted", "source"))
    if form == "medusa" and ("matrix" in case or "biases" in case):
        # each head has its own copy of the matrix, and biases of zeros
        for number in range(3):
            name = "lm_head.weight" if "matrix" in case else f"heads.{number}.lm_head.weight"
            matrix = found.weights.array(f"heads.{number}.lm_head.weight")
            np.testing.assert_array_equal(matrix, expected.weights.array(name))
            bias = found.weights.array(f"heads.{number}.blocks.1.bias")
            np.testing.assert_array_equal(bias, 0 * bias if "biases" in case else heads[number][0][1][1])
        return
    assert_same(found, expected)


def test_other_forms_refuse_medusa_heads_and_language_models_by_name(tmp_path: Path, target_folder: Path) -> None:
    source = write_medusa(tmp_path / "source", random_heads(target_folder))
    for form in ("deepspec", "speculators"):
        with pytest.raises(
            CheckpointError, match=rf"{form}: .* no place for a Medusa drafter; use --to medusa or --to"
        ):
            convert(source, target_folder, form, tmp_path / "converted")
    with pytest.raises(
        CheckpointError, match=r"vllm: .* no place for a draft language model; its checkpoint is a model"
    ):
        convert(target_folder, target_folder, "vllm", tmp_path / "converted")
