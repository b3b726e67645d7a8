"""A target built for drafter lookahead, on its own engine: the output is that of plain decoding, and trajectories give
drafts where copies give none."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark_trt.building.build import build
from dspark_trt.building.finished import read_finished
from dspark_trt.building.plan import make_plan
from dspark_trt.calibration.file import CALIBRATION_FILE, load_calibration
from dspark_trt.checkpoints.spec import NgramSpec
from dspark_trt.cli import app
from dspark_trt.commands.exactness import check_exactness
from dspark_trt.commands.generation import generate
from dspark_trt.commands.ray_calibration import record_over_ray
from dspark_trt.contract.lookup import UNMEASURED_LOOKUP
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.deployment import Deployment, load_deployment
from dspark_trt.errors import RecipeError

MODES = ("fixed", "fixed:2", "threshold:0.2", "early_stop", "lagged_budget", "auto")
PROMPTS = [[5, 6, 7, 8] * (2 + number) + [9 + number, 5, 6] for number in range(6)]  # more requests than rows


@pytest.fixture(scope="module")
def deployment(ngram_build: Path) -> Deployment:
    """The engines of a build with drafter ngram are the same."""
    return replace(load_deployment(ngram_build), drafter_spec=NgramSpec(5, "lookahead"))


def greedy(deployment: Deployment, mode: str) -> tuple[list[list[int]], int]:
    """Token ids of every answer, and drafts verified."""
    sampling = deployment.sampling_params(max_tokens=40, temperature=0.0, ignore_eos=True)
    results = generate(deployment, PROMPTS, sampling, parse_scheduler(mode))
    return [result["token_ids"] for result in results], sum(result["num_drafts_verified"] for result in results)


@pytest.fixture(scope="module")
def plain(deployment: Deployment) -> list[list[int]]:
    return greedy(deployment, "off")[0]


@pytest.mark.parametrize("mode", MODES)
def test_greedy_text_is_that_of_plain_decoding(deployment: Deployment, mode: str, plain: list[list[int]]) -> None:
    found, verified = greedy(deployment, mode)
    assert found == plain
    if mode == "fixed":
        assert verified > 100


def test_sampled_tokens_are_the_targets_own(deployment: Deployment) -> None:
    """A chi-square test with a false-failure probability of 1e-4, over all modes."""
    found = check_exactness(deployment, PROMPTS[:3], ("fixed", "early_stop", "auto"), num_tokens=24, num_samples=8)
    assert found.has_passed, found
    assert found.modes[0].num_drafts_verified > 100


def test_build_is_calibrated_on_verified_trajectories(ngram_build: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ngram_build, tmp_path / "build"))
    recipe = read_finished(folder)[0].recipe.model_copy(update={"drafter": "lookahead"})
    made = [result.stage for result in build(recipe, folder) if result.was_built]
    assert made[0] == "checkpoints"
    assert json.loads((folder / "checkpoints" / "drafter.json").read_text()) == {"kind": "lookahead", "gamma": 5}
    found = load_calibration(folder / "calibration" / CALIBRATION_FILE, gamma=5)
    assert found.kind == "lookup"
    assert found.lookup_acceptance != UNMEASURED_LOOKUP
    seen = found.provenance["num_lookups"]["greedy"]
    assert sum(seen) > 0
    assert {length for length, count in enumerate(seen, start=1) if count} <= {1, 2, 4, 8}
    assert load_deployment(folder).drafter_spec == NgramSpec(5, "lookahead")
    with pytest.raises(RecipeError, match="found lookahead; calibrate it without --ray"):
        record_over_ray("local", folder, [], budget_s=1.0, max_tokens=8, num_samples=1)
    told = "from each request's own text and from what the target said of rejected drafts"
    assert make_plan(recipe, tmp_path / "out").facts()["drafter"] == f"lookahead: no model; up to 5 drafts {told}"
    shown = " ".join(CliRunner().invoke(app, ["inspect", str(folder)], catch_exceptions=False).stdout.split())
    assert "lookahead (no model)" in shown
    assert f"up to 5 drafts {told}" in shown
