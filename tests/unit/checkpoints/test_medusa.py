"""Medusa checkpoints are read as their forms mean them, and contradictions are refused by the key that decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.checkpoints.drafter import read_drafter, read_drafter_spec
from dspark_trt.checkpoints.drafters.medusa import describe_medusa, is_medusa
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.spec import MedusaSpec, TargetCheckpoint
from dspark_trt.checkpoints.spec_json import drafter_spec_from_json, spec_to_json
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError
from tests.support.factories import write_target
from tests.support.medusa_forms import Head, random_heads, write_medusa, write_vllm_medusa
from tests.unit.checkpoints.test_drafter_dialects import changes_of


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetCheckpoint:
    return read_target(str(write_target(tmp_path_factory.mktemp("target"))))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> list[Head]:
    return random_heads(write_target(tmp_path_factory.mktemp("target")))


def test_both_forms_mean_the_same(tmp_path: Path, target: TargetCheckpoint, heads: list[Head]) -> None:
    folders = write_medusa(tmp_path / "medusa", heads), write_vllm_medusa(tmp_path / "vllm", heads)
    drafters = [read_drafter(str(folder), target) for folder in folders]
    spec = drafters[0].spec
    assert isinstance(spec, MedusaSpec)
    assert drafters[1].spec == spec
    assert (spec.gamma, spec.num_blocks, spec.target_layer_ids, spec.is_last_tap_normed) == (4, 1, (3,), True)
    assert spec.has_block_bias
    for name in drafters[0].weights.names():
        np.testing.assert_array_equal(*(drafter.weights.array(name) for drafter in drafters))
    for folder, drafter in zip(folders, drafters, strict=True):
        check_pairing(target, drafter)
        assert read_drafter_spec(str(folder), target.spec) == spec
    assert drafter_spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_the_option_says_how_many_heads_are_used(tmp_path: Path, target: TargetCheckpoint, heads: list[Head]) -> None:
    folder = write_medusa(tmp_path, heads)
    drafter = read_drafter(str(folder), target, num_drafts=2)
    assert drafter.spec.gamma == 2
    assert len(drafter.weights.names()) == 6
    with pytest.raises(CheckpointError, match=r"num_drafts: 5 drafts of 4 heads .* give --num-drafts 4 or less"):
        read_drafter_spec(str(folder), target.spec, num_drafts=5)


MAP = np.array([5, 2, 90])
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another number of heads": ("medusa", {"extra": {"medusa_num_heads": 2}}, r"medusa_num_heads = 2, .* of 4 heads"),
    "no number of heads": ("vllm", {"extra": {"num_heads": None}}, r"medusa_num_heads is missing"),
    "too many blocks": ("medusa", {"extra": {"medusa_num_layers": 2}}, r"heads\.0\.blocks\.1\.weight is missing"),
    "too few blocks": ("medusa", {"extra": {"medusa_num_layers": 0}}, r"heads\.0\.blocks\.0\.\w+ .*is not expected"),
    "another width": ("vllm", {"extra": {"hidden_size": 64}}, r"hidden_size = 64, but the target has 32"),
    "another vocabulary": ("vllm", {"extra": {"vocab_size": 98}}, r"vocab_size = 98, but the target has 97"),
    "no bias": ("vllm", {"extra": {"medusa_fc_bias": False}}, r"medusa_fc_bias is False, but .* is there"),
    "a bias": ("vllm", {"has_bias": False, "extra": {"medusa_fc_bias": True}}, r"medusa_fc_bias is True, .* missing"),
    "no map": (
        "vllm",
        {"extra": {"truncated_vocab_size": 40}},
        r"truncated_vocab_size = 40 of 97 ids, but there",
    ),
    "ids twice": ("vllm", {"token_map": np.array([5, 2, 5])}, r"token_map: expected 3 different ids below 97"),
    "unknown ids": (
        "vllm",
        {"token_map": np.array([5, 2, 97]), "is_map_applied": False},
        r"token_map: .* found shape \[3\] with ids from 2 to 97",
    ),
    "map of another size": ("vllm", {"token_map": MAP, "extra": {"truncated_vocab_size": 4}}, r"token_map: expected 4"),
    "scaled": ("vllm", {"extra": {"logit_scale": 0.5}}, r"logit_scale = 0.5 is not implemented"),
    "Hydra": ("medusa", {"extra": {"medusa_num_heads": None, "hydra_num_heads": 4}}, r"the Hydra format"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused(case: str, tmp_path: Path, target: TargetCheckpoint, heads: list[Head]) -> None:
    form, options, message = REFUSED[case]
    folder = (write_medusa if form == "medusa" else write_vllm_medusa)(tmp_path, heads, **options)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(str(folder), target)


def test_heads_in_a_file_of_torch_are_refused(tmp_path: Path, target: TargetCheckpoint, heads: list[Head]) -> None:
    folder = write_medusa(tmp_path, heads)
    (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=r"found medusa_lm_head\.pt, which is another format"):
        read_drafter(str(folder), target)


def test_odd_values_of_any_key_end_in_one_message(tmp_path: Path, target: TargetCheckpoint, heads: list[Head]) -> None:
    num_refused = 0
    for write in (write_medusa, write_vllm_medusa):
        config = json.loads((write(tmp_path / write.__name__, heads) / "config.json").read_text())
        for change in changes_of(config):
            if not is_medusa(change):
                continue
            try:
                spec_to_json(describe_medusa(change, "config.json", target.spec, None))
            except CheckpointError:
                num_refused += 1
    assert num_refused > 50
