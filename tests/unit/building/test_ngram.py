"""`build --drafter ngram`: what is refused, what is planned, and what is made without a drafter's checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

from dspark_trt.building.backends import choose_backend
from dspark_trt.building.build import build
from dspark_trt.building.finished import check_servable, read_finished
from dspark_trt.building.limits import check_recipe
from dspark_trt.building.plan import make_plan
from dspark_trt.building.recipe import BuildRecipe, load_recipe
from dspark_trt.calibration.file import CALIBRATION_FILE, load_calibration
from dspark_trt.checkpoints.spec_json import read_draft_source
from dspark_trt.contract.lookup import UNMEASURED_LOOKUP
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.errors import CheckpointError, ManifestError, RecipeError
from dspark_trt.machine.gpu import Gpu
from dspark_trt.server.openai.settings import FrontEndOptions, make_settings
from dspark_trt.server.summary import footprint
from dspark_trt.steptable.table import StepTable


@pytest.mark.parametrize(
    "given",
    [
        {"draft_vocab": "all"},
        {"drafter_precision": "int8"},
        {"markov_top_n": 0},
        {"drafter_revision": "main"},
        {"lookup": "off"},
    ],
)
def test_options_of_a_drafter_that_is_a_model_are_refused(given: dict[str, Any]) -> None:
    (name,) = given
    for drafter in ("ngram", "lookahead"):
        with pytest.raises(RecipeError, match=rf"^{name}: .* means nothing to drafter {drafter}.*; leave --.* out$"):
            check_recipe(BuildRecipe(target="t", drafter=drafter, **given))


def test_length_of_lookups_is_refused_beside_a_model_and_out_of_range() -> None:
    with pytest.raises(RecipeError, match=r"^lookup_drafts: 3 is for drafter ngram"):
        check_recipe(BuildRecipe(target="t", drafter="d", lookup_drafts=3))
    for number in (1, 17):
        with pytest.raises(RecipeError, match="lookup_drafts"):
            load_recipe(None, {"target": "t", "drafter": "ngram", "lookup_drafts": number})


def test_backends_of_gpus_are_refused_and_auto_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match=r"^drafter: ngram runs on backend onnxruntime only, found tensorrt;"):
        choose_backend(BuildRecipe(target="t", drafter="ngram", backend="tensorrt"))
    gpu = Gpu(name="H100", sm=90, memory_bytes=80 * 10**9, driver="570")
    monkeypatch.setattr("dspark_trt.building.backends.look_for_gpu", lambda: gpu)
    choice = choose_backend(BuildRecipe(target="t", drafter="ngram"))
    assert (choice.recipe.backend, choice.reason) == ("onnxruntime", "drafter ngram runs on onnxruntime only")


@pytest.fixture(scope="module")
def recipe(ngram_build: Path) -> BuildRecipe:
    return read_finished(ngram_build)[0].recipe


def test_plan_counts_one_model(recipe: BuildRecipe, ngram_build: Path, tmp_path: Path) -> None:
    plan = make_plan(recipe, tmp_path / "out")
    assert plan.facts()["drafter"] == "ngram: no model; up to 5 drafts copied from each request's own text"
    assert plan.kv_bytes == footprint(ngram_build).kv_bytes


def test_folder_of_the_name_is_a_checkpoint(recipe: BuildRecipe, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\./ngram does not exist"):
        make_plan(recipe.model_copy(update={"drafter": "./ngram", "lookup_drafts": 7}), tmp_path / "out")


def test_more_drafts_than_are_copied_are_refused_at_every_door(
    recipe: BuildRecipe, ngram_build: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="fixed:6 verifies more drafts than a block has, 5"):
        make_plan(recipe.model_copy(update={"scheduler": "fixed:6"}), tmp_path / "out")
    with pytest.raises(RecipeError, match="fixed:6 verifies more drafts than a block has, 5"):
        check_servable(ngram_build, parse_scheduler("fixed:6"))
    check_servable(ngram_build, parse_scheduler("fixed:5"))


def test_graphs_hold_a_target_without_taps_and_nothing_else(ngram_build: Path) -> None:
    assert [path.name for path in (ngram_build / "graphs").glob("*.onnx")] == ["target.onnx"]
    graph = onnx.load(ngram_build / "graphs" / "target.onnx", load_external_data=False).graph
    assert "taps" not in {output.name for output in graph.output}


def test_one_file_says_what_drafts(ngram_build: Path) -> None:
    path = ngram_build / "checkpoints" / "drafter.json"
    assert json.loads(path.read_text()) == {"kind": "ngram", "gamma": 5}
    assert read_draft_source(ngram_build).gamma == 5
    settings = make_settings(
        ngram_build, FrontEndOptions(), grpc_address="a:1", metrics_url="http://a:2", default_timeout_s=1.0
    )
    assert settings.gamma == 5


def test_step_table_prices_the_target_and_the_host_alone(ngram_build: Path) -> None:
    table = StepTable.load(ngram_build / "steptable" / "step_table.json")
    assert (table.num_slots, table.ingest_tokens, table.ingest_ms) == ((), (), ())
    assert table.draft_cost(4, 5, 10.0) == table.ingest_cost(8) == 0.0
    assert min(table.host_ms) > 0
    assert set(table.drafting_host_ms) == {0.0}
    assert {1, 2, 3, 4, 5} <= set(table.extra_tokens), "as many drafts as are copied"


def test_calibration_measures_lookups_and_no_lines(ngram_build: Path) -> None:
    found = load_calibration(ngram_build / "calibration" / CALIBRATION_FILE, gamma=5)
    assert found.kind == "lookup"
    assert set(found.greedy.slopes) == {1.0}
    assert found.lookup_acceptance != UNMEASURED_LOOKUP
    assert all(sum(found.provenance["num_lookups"][regime]) > 0 for regime in ("greedy", "sampled"))


@pytest.fixture
def copied(ngram_build: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ngram_build, tmp_path / "copy"))


def made(recipe: BuildRecipe, folder: Path) -> list[str]:
    return [result.stage for result in build(recipe, folder) if result.was_built]


def test_second_build_keeps_everything_and_a_given_calibration_is_used(recipe: BuildRecipe, copied: Path) -> None:
    assert made(recipe, copied) == []
    given = Path(shutil.copy(copied / "calibration" / CALIBRATION_FILE, copied.parent / "given.json"))
    expected = load_calibration(given).lookup
    assert made(recipe.model_copy(update={"calibration": given}), copied) == ["calibration"]
    assert load_calibration(copied / "calibration" / CALIBRATION_FILE).lookup == expected


def test_temperatures_are_refused_as_a_calibration(recipe: BuildRecipe, tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    path.write_text(json.dumps({"temperatures": [1.0] * 5}))
    with pytest.raises(RecipeError, match=r"calibration: .*sts\.json: expected how often copied drafts are accepted"):
        make_plan(recipe.model_copy(update={"calibration": path}), tmp_path / "out")


def test_another_number_of_drafts_is_another_build_from_the_start(
    recipe: BuildRecipe, copied: Path, tmp_path: Path
) -> None:
    given = Path(shutil.copy(copied / "calibration" / CALIBRATION_FILE, tmp_path / "given.json"))
    data = json.loads(given.read_text())
    for name in ("greedy", "sampled"):
        data[name] = {"slopes": [1.0] * 2, "offsets": [0.0] * 2}
    given.write_text(json.dumps(data | {"temperatures": [1.0] * 2}))
    changed = recipe.model_copy(update={"lookup_drafts": 2, "calibration": given})
    assert made(changed, copied)[:2] == ["checkpoints", "graphs"]
    assert read_draft_source(copied).gamma == 2


def test_build_whose_drafter_file_is_damaged_is_refused(copied: Path) -> None:
    from dspark_trt.engines.open import open_engines

    (copied / "checkpoints" / "drafter.json").write_text("{")
    with pytest.raises(ManifestError, match=r"drafter\.json cannot be read"):
        open_engines(copied)
