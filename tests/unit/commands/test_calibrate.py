"""`calibrate`: the calibration stage of a finished build, measured again or imported; the chain stays valid."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dspark_trt.building.build import build
from dspark_trt.building.finished import check_servable, read_finished
from dspark_trt.building.manifest import MANIFEST_NAME
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.calibration.file import load_calibration
from dspark_trt.cli import app
from dspark_trt.commands.calibration_report import COLUMNS, write_report
from dspark_trt.deployment import load_deployment
from dspark_trt.errors import RecipeError
from tests.support.factories import write_drafter, write_target

CALIBRATION = Path("calibration") / "calibration.json"


@pytest.fixture
def copied(output: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(output, tmp_path / "copy"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that record about a thousand blocks: the packaged prompts are too long for so small a pair."""
    path = tmp_path_factory.mktemp("prompts") / "short.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number:b}"[-6:]}) + "\n" for number in range(24)))
    return ["--prompts", str(path), "--max-tokens", "25"]


def calibrate(folder: Path, *options: str) -> Result:
    result = CliRunner().invoke(app, ["calibrate", str(folder), *options])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def gamma_of(folder: Path) -> int:
    return load_calibration(folder / CALIBRATION).calibration.gamma


def write_temperatures(path: Path, gamma: int) -> Path:
    path.write_text(json.dumps({"temperatures": [1.5] * gamma}))
    return path


@dataclass(frozen=True)
class Calibrated:
    folder: Path
    printed: list[str]
    html: str
    created_before: dict[str, str]  # by stage

    @property
    def gamma(self) -> int:
        return gamma_of(self.folder)


@pytest.fixture(scope="module")
def calibrated(output: Path, prompts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    folder = Path(shutil.copytree(output, tmp_path_factory.mktemp("calibrated") / "copy"))
    before = {name: manifest.created for name, manifest in read_finished(folder)[1].items()}
    page = folder.parent / "calibration.html"
    printed = calibrate(folder, *prompts, "--report", str(page)).stdout.splitlines()
    return Calibrated(folder, printed, page.read_text(), before)


def test_calibration_alone_is_renewed_and_the_next_build_keeps_it(calibrated: Calibrated) -> None:
    folder, before = calibrated.folder, calibrated.created_before
    found = load_calibration(folder / CALIBRATION)
    assert (found.kind, found.provenance["max_tokens"]) == ("fitted", 25)
    check_servable(folder)
    summary, after = read_finished(folder)
    for name in ("checkpoints", "graphs", "engines", "steptable", "triton_model_repo"):
        assert after[name].created == before[name]
    kept = (folder / CALIBRATION).read_bytes()
    assert not any(build_stages(summary.recipe, folder).values())
    assert (folder / CALIBRATION).read_bytes() == kept


def test_page_holds_a_diagram_a_position_and_needs_no_network(calibrated: Calibrated) -> None:
    html, gamma = calibrated.html, calibrated.gamma
    assert html.count("<svg") == html.count(">before<") == html.count(">after<") == gamma
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in html


def test_table_has_a_line_a_position_with_errors_and_their_intervals(calibrated: Calibrated, tmp_path: Path) -> None:
    lines = calibrated.printed[-calibrated.gamma :]
    assert [line.split()[0] for line in lines] == [str(at + 1) for at in range(calibrated.gamma)]
    for line in lines:
        assert line.count("% [") == line.count("]") == 3  # before, after, by temperature
    write_report(tmp_path / "page.md", load_calibration(calibrated.folder / CALIBRATION), "pair")
    rows = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| ")]
    assert [row.count("|") for row in rows] == [len(COLUMNS) + 1] * (calibrated.gamma + 2)


def test_too_few_prompts_leave_the_build_neutral_and_the_table_says_so(copied: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "bc", "d", "e")))
    printed = calibrate(copied, "--prompts", str(few), "--max-tokens", "16").stdout
    assert "neutral: too few blocks, expected at least 400 to fit and 100 held out" in printed
    assert "of 3 prompts" in printed
    assert load_calibration(copied / CALIBRATION).kind == "neutral"


def test_imported_temperatures_are_what_a_server_divides_by(copied: Path, tmp_path: Path) -> None:
    gamma = gamma_of(copied)
    printed = calibrate(copied, "--import", str(write_temperatures(tmp_path / "sts.json", gamma))).stdout
    assert "imported from sts.json" in printed
    assert load_deployment(copied).calibration.greedy.slopes == pytest.approx([1 / 1.5] * gamma)


def test_import_keeps_what_the_build_measured_of_its_drafts(calibrated: Calibrated, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(calibrated.folder, tmp_path / "copy"))
    measured = load_calibration(folder / CALIBRATION)
    calibrate(folder, "--import", str(write_temperatures(tmp_path / "sts.json", gamma_of(folder))))
    found = load_calibration(folder / CALIBRATION)
    assert found.kind == "imported"
    assert found.survival == measured.survival != ()
    assert found.lookup == measured.lookup is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "0"], "--seconds: expected a number above 0"),
        (["--seconds", "nan"], "--seconds: expected a number above 0"),
        (["--max-tokens", "1"], "--max-tokens: expected at least 2"),
        (["--samples", "0"], "--samples: expected at least 1"),
        (["--report", "x.pdf"], "--report: expected a name that ends in .md or .html"),
        (["--report", "no/such/folder/x.md"], "--report: the folder"),
        (["--prompts", "no_such_file"], "prompts no_such_file cannot be read"),
        (["--import", "no_such_file"], "--import: no_such_file cannot be read"),
        (["--import", "x", "--seconds", "5"], "goes without --prompts"),
        (["--import", "x", "--ray", "auto"], "goes without --prompts"),
        (["--records", "x"], "--records: expected with --ray only"),
    ],
)
def test_options_that_make_no_sense_are_refused_and_the_build_stays(
    options: list[str], message: str, output: Path
) -> None:
    before = (output / MANIFEST_NAME).read_bytes()
    with pytest.raises(RecipeError, match=message):
        calibrate(output, *options)
    assert (output / MANIFEST_NAME).read_bytes() == before


def test_recipe_that_gives_a_file_is_built_with_it_and_hashed_by_it(copied: Path, tmp_path: Path) -> None:
    recipe, gamma = read_finished(copied)[0].recipe, gamma_of(copied)
    path = write_temperatures(tmp_path / "sts.json", gamma)
    given = recipe.model_copy(update={"calibration": path})
    made = build_stages(given, copied)
    assert [name for name, was_built in made.items() if was_built] == ["calibration"]
    assert load_calibration(copied / CALIBRATION).temperatures == (1.5,) * gamma
    assert not any(build_stages(given, copied).values())
    path.write_text(json.dumps({"temperatures": [2.5] * gamma}))
    assert build_stages(given, copied)["calibration"]
    assert load_calibration(copied / CALIBRATION).temperatures == (2.5,) * gamma


def test_recipe_with_a_file_of_another_drafter_is_refused_before_anything_is_made(copied: Path, tmp_path: Path) -> None:
    path = write_temperatures(tmp_path / "sts.json", gamma_of(copied) + 1)
    recipe = read_finished(copied)[0].recipe.model_copy(update={"calibration": path})
    with pytest.raises(RecipeError, match=r"calibration: .*sts\.json: expected \d+ slots, found"):
        build(recipe, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_drafter_without_a_confidence_head_is_calibrated_on_its_margin(prompts: list[str], tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", vocab_size=320, head_dim=16, tokenizer=True)
    dflash = write_drafter(tmp_path / "drafter", target, markov_rank=0, confidence=False)
    given = write_temperatures(tmp_path / "sts.json", 5)  # so that building measures none
    form: dict[str, Any] = {"draft_vocab": "all", "drafter_precision": "fp32", "markov_top_n": 0}  # nothing to choose
    limits = {"max_requests": 4, "max_seq_len": 64, "max_batch_tokens": 64}
    build(BuildRecipe(target=str(target), drafter=str(dflash), calibration=given, **form, **limits), tmp_path / "out")
    printed = calibrate(tmp_path / "out", *prompts).stdout
    found = load_calibration(tmp_path / "out" / CALIBRATION)
    assert found.kind == "fitted"
    before, after = found.before[0], found.after[0]
    assert abs(after["mean_predicted"] - after["mean_observed"]) < 0.1
    assert abs(after["mean_predicted"] - after["mean_observed"]) < abs(
        before["mean_predicted"] - before["mean_observed"]
    )
    assert "% [" in printed


def build_stages(recipe: BuildRecipe, folder: Path) -> dict[str, bool]:
    return {result.stage: result.was_built for result in build(recipe, folder)}
