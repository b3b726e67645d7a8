"""An EAGLE-3 drafter at the command line: built, shown, generated with and verified, or refused in one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from dspark_trt.building.plan import make_plan
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.cli import app
from dspark_trt.errors import RecipeError
from tests.support.eagle3_dialects import write_eagle3
from tests.support.factories import write_drafter, write_target

LIMITS = ("--max-requests", "4", "--max-seq-len", "64", "--max-batch-tokens", "64", "--num-threads", "1")
CHOSEN = ("--draft-vocab", "all", "--drafter-precision", "fp32", "--markov-top-n", "0")  # choosing takes long


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_target(folder, vocab_size=320, head_dim=16, layers=8, tokenizer=True)


@pytest.fixture(scope="module")
def built(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle3")
    ids = np.arange(0, 320, 2)
    drafter = write_eagle3(folder / "drafter", target, "community", layer_ids=None, draft_ids=ids)
    pair = ("--target", str(target), "--drafter", str(drafter), "--output", str(folder / "build"))
    run("build", *pair, *LIMITS, *CHOSEN, "--num-drafts", "3")
    return folder / "build"


def test_inspect_tells_the_family(built: Path) -> None:
    shown = " ".join(run("inspect", str(built)).stdout.split())
    assert "EAGLE-3 drafter" in shown
    assert "gamma 3, one token after the other, a head for 160 ids, taps [1, 3, 4]" in shown
    found = run_json("inspect", str(built))["drafter"]
    assert (found["kind"], found["gamma"], found["target_layer_ids"]) == ("eagle3", 3, [1, 3, 4])


def test_generate_gives_the_text_of_plain_decoding(built: Path) -> None:
    options = ["--prompt", "abcabcabc", "--max-tokens", "24", "--temperature", "0"]
    plain, drafted = (run_json("generate", str(built), *options, "--scheduler", mode) for mode in ("off", "fixed"))
    assert drafted["num_drafts_verified"] > 0
    assert drafted["token_ids"] == plain["token_ids"]


def test_verify_passes_in_its_default_modes(built: Path) -> None:
    found = run_json("verify", str(built), "--prompts", "1", "--samples", "2", "--max-tokens", "8")
    assert found["has_passed"]
    assert sum(mode["num_drafts_verified"] for mode in found["modes"]) > 0


def test_what_a_family_cannot_do_is_refused_before_the_build(target: Path, tmp_path: Path) -> None:
    block = write_drafter(tmp_path / "block", target)
    with pytest.raises(RecipeError, match=r"num_drafts: 3 means nothing to a block drafter, whose block has 5"):
        make_plan(BuildRecipe(target=str(target), drafter=str(block), num_drafts=3), tmp_path / "out")
    with pytest.raises(RecipeError, match=r"num_drafts: 3 means nothing to drafter ngram"):
        make_plan(BuildRecipe(target=str(target), drafter="ngram", num_drafts=3), tmp_path / "out")
