"""A language model, PARD and Medusa at the command line: built, shown, generated with and verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.building.plan import make_plan
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.errors import PairingError
from tests.support.factories import write_target
from tests.support.medusa_forms import random_heads, write_medusa
from tests.unit.commands.test_eagle3 import CHOSEN, LIMITS, run, run_json

SMALL: dict[str, Any] = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "tokenizer": True}
SHOWN = {
    "model": ("draft language model", "gamma 3, one token after the other, a head for 300 ids, no taps"),
    "pard": ("draft language model", "gamma 3, all in one pass, mask token 310, no taps"),
    "medusa": ("Medusa drafter", "gamma 3, a head for each draft, taps [3]"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), vocab_size=320, head_dim=16, tokenizer=True)


def write_drafter(folder: Path, target: Path, family: str) -> Path:
    if family == "medusa":
        return write_medusa(folder, random_heads(target, num_heads=3))
    if family == "pard":
        return write_target(folder, vocab_size=320, tied=True, config_extra={"pard_token": 310}, **SMALL)
    return write_target(folder, family="qwen3", vocab_size=300, **SMALL)


@pytest.fixture(scope="module", params=SHOWN)
def built(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    drafter = write_drafter(folder / "drafter", target, request.param)
    pair = ("--target", str(target), "--drafter", str(drafter), "--output", str(folder / "build"))
    run("build", *pair, *LIMITS, *CHOSEN, "--num-drafts", "3")
    return request.param, folder / "build"


def test_a_build_is_shown_generates_the_text_of_plain_decoding_and_passes_verify(built: tuple[str, Path]) -> None:
    family, build = built
    shown = " ".join(run("inspect", str(build)).stdout.split())
    for words in SHOWN[family]:
        assert words in shown
    options = ["--prompt", "abcabcabc", "--max-tokens", "24", "--temperature", "0"]
    plain, drafted = (run_json("generate", str(build), *options, "--scheduler", mode) for mode in ("off", "fixed"))
    assert drafted["num_drafts_verified"] > 0
    assert drafted["token_ids"] == plain["token_ids"]
    found = run_json("verify", str(build), "--prompts", "1", "--samples", "2", "--max-tokens", "8")
    assert found["has_passed"]
    assert sum(mode["num_drafts_verified"] for mode in found["modes"]) > 0


def test_a_build_for_a_gpu_is_planned_with_the_kv_memory_of_the_drafter(target: Path, tmp_path: Path) -> None:
    """Medusa has none."""
    kv_bytes = {}
    for family in ("model", "medusa"):
        drafter = write_drafter(tmp_path / family, target, family)
        recipe = BuildRecipe(
            target=str(target), drafter=str(drafter), backend="tensorrt_rtx", compute_capabilities=(89,)
        )
        plan = make_plan(recipe, tmp_path / "out")
        kv_bytes[family] = plan.kv_bytes
    positions = plan.max_seq_len + recipe.max_batch_tokens  # of one request: the GPU is not here
    of_position = 2 * SMALL["layers"] * SMALL["kv_heads"] * SMALL["head_dim"]
    of_row = kv_bytes["model"] - kv_bytes["medusa"]
    assert 1.0 <= of_row / (positions * of_position * 2) < 1.1  # bytes, and a place behind it for the drafts


def test_a_model_of_other_tokens_is_refused_before_the_build(target: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter", target, "model")
    file = drafter / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(values))
    with pytest.raises(PairingError, match="is 'a' to the target and 'b' to the drafter, one of 2 that differ"):
        make_plan(BuildRecipe(target=str(target), drafter=str(drafter)), tmp_path / "out")
