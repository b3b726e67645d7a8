"""The build, end to end on tiny random checkpoints: kept stages, interruption, tampering, moving."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark_trt_plugins.markov_head.form import EXCLUDED_LOGIT

from dspark_trt.building import build as build_module
from dspark_trt.building.build import build
from dspark_trt.building.manifest import STAGE_NAMES
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.building.stages import STAGES
from dspark_trt.commands.inspect import inspect_build
from dspark_trt.contract.protocol import DraftBatch
from dspark_trt.deployment import load_deployment
from dspark_trt.errors import CheckpointError, ExportError, ManifestError, RecipeError
from tests.support.factories import write_drafter, write_target

LIMITS = {"max_requests": 2, "max_seq_len": 64, "max_batch_tokens": 32}
PLAIN_FORM: dict[str, Any] = {"draft_vocab": "all", "drafter_precision": "fp32", "markov_top_n": 0}  # nothing to choose


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> BuildRecipe:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", vocab_size=320, head_dim=16, tokenizer=True)
    drafter = write_drafter(folder / "drafter", target)
    return BuildRecipe(target=str(target), drafter=str(drafter), **PLAIN_FORM, **LIMITS)


@pytest.fixture(scope="module")
def finished(recipe: BuildRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("build") / "pair"
    results = build(recipe, output)
    assert [result.stage for result in results] == [stage.name for stage in STAGES]
    assert all(result.was_built for result in results)
    return output


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "copied")


def test_second_build_with_nothing_changed_does_nothing(recipe: BuildRecipe, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.parent != finished}
    results = build(recipe, finished)
    assert not any(result.was_built for result in results)
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.parent != finished}


def test_verify_hashes_what_size_and_time_do_not_show(recipe: BuildRecipe, copied: Path) -> None:
    graph = copied / "graphs" / "target.onnx"
    stat = graph.stat()
    content = bytearray(graph.read_bytes())
    content[-1] ^= 1
    graph.write_bytes(content)
    os.utime(graph, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ManifestError, match=r"target\.onnx was changed"):
        inspect_build(copied, verify=True)
    rebuilt = {result.stage: result.was_built for result in build(recipe, copied, verify=True)}
    assert rebuilt["graphs"]
    assert not rebuilt["checkpoints"]
    inspect_build(copied, verify=True)


def test_changed_limits_keep_the_checkpoints_and_rebuild_what_follows(recipe: BuildRecipe, copied: Path) -> None:
    results = build(recipe.model_copy(update={"max_seq_len": 48}), copied)
    assert [result.stage for result in results if not result.was_built] == ["checkpoints"]


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ("plugins/row_attention/function_body.py", "graphs"),
        ("plugins/body.py", "graphs"),
        ("dspark_trt/contract/bindings.py", "graphs"),
        ("dspark_trt/engines/onnxruntime/session.py", "steptable"),
    ],
)
def test_stages_are_made_again_from_the_first_on_that_an_edit_decides(
    source: str, first: str, recipe: BuildRecipe, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Function bodies come from the plugins, names and shapes from bindings;
    a step table has timed what runs an engine."""
    path, read = Path(__file__).parents[3] / source, Path.read_bytes
    assert path.exists()
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + (b"#" if p.resolve() == path.resolve() else b""))
    built = [result.stage for result in build(recipe, copied) if result.was_built]
    assert built[0] == first


@pytest.mark.parametrize("failing", [stage.name for stage in STAGES])
def test_interrupted_stage_leaves_nothing_half_written_and_the_next_build_resumes(
    recipe: BuildRecipe, copied: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copied / failing)

    def interrupt(context: object, folder: Path, progress: object) -> None:
        (folder / "half").write_text("written")
        raise KeyboardInterrupt

    broken = tuple(replace(stage, make=interrupt) if stage.name == failing else stage for stage in STAGES)
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "STAGES", broken)
        with pytest.raises(KeyboardInterrupt):
            build(recipe, copied)
    assert not (copied / failing).exists()
    assert not list(copied.glob(".*.partial"))
    with pytest.raises(ManifestError):
        load_deployment(copied)
    results = build(recipe, copied)
    assert [result.stage for result in results if result.was_built] == [failing]


def test_full_disk_is_told_with_the_folder_that_it_concerns(
    recipe: BuildRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(context: object, folder: Path, progress: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    broken = tuple(replace(stage, make=fill) if stage.name == "graphs" else stage for stage in STAGES)
    monkeypatch.setattr(build_module, "STAGES", broken)
    with pytest.raises(OSError, match=r"No space left on device: '.*out/graphs'"):
        build(recipe, tmp_path / "out")


def test_leftovers_of_a_killed_build_are_cleared(recipe: BuildRecipe, copied: Path) -> None:
    (copied / ".graphs.partial").mkdir()
    build(recipe, copied)
    assert not (copied / ".graphs.partial").exists()


def test_moved_directory_still_loads(finished: Path, copied: Path) -> None:
    deployment = load_deployment(copied)
    assert deployment.drafter.gamma == deployment.calibration.gamma


def test_stage_of_another_build_is_refused(recipe: BuildRecipe, copied: Path, tmp_path: Path) -> None:
    build(recipe.model_copy(update={"max_seq_len": 48}), tmp_path / "other")
    shutil.rmtree(copied / "graphs")
    shutil.copytree(tmp_path / "other" / "graphs", copied / "graphs")
    with pytest.raises(ManifestError, match="another build"):
        load_deployment(copied)


def test_directory_with_other_things_is_not_overwritten(recipe: BuildRecipe, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ManifestError, match=r"thesis\.txt"):
        build(recipe, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_folder_of_the_users_that_is_named_like_a_stage_is_not_overwritten(recipe: BuildRecipe, tmp_path: Path) -> None:
    shutil.copytree(recipe.target, tmp_path / "checkpoints" / "target")
    (tmp_path / "manifest.json").write_text('{"name": "some other program"}')
    with pytest.raises(ManifestError, match="checkpoints"):
        build(recipe.model_copy(update={"target": str(tmp_path / "checkpoints" / "target")}), tmp_path)
    assert (tmp_path / "checkpoints" / "target" / "config.json").is_file()


def test_damaged_stage_manifest_of_a_finished_build_is_made_again(recipe: BuildRecipe, copied: Path) -> None:
    (copied / "graphs" / "manifest.json").write_text("{")
    assert "graphs" in [result.stage for result in build(recipe, copied) if result.was_built]
    inspect_build(copied, verify=True)


def test_output_that_cannot_be_a_directory_is_refused(recipe: BuildRecipe, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="cannot be used"):
        build(recipe, tmp_path / "file" / "below")


def test_stage_names_are_those_of_the_stages() -> None:
    assert tuple(stage.name for stage in STAGES) == STAGE_NAMES


def test_failed_first_build_of_a_missing_target_says_what_to_do(recipe: BuildRecipe, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        build(recipe.model_copy(update={"target": str(tmp_path / "none" / "x" / "y")}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_default_length_follows_a_target_of_short_context(recipe: BuildRecipe, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", vocab_size=320, head_dim=16, tokenizer=True, max_positions=48)
    drafter = write_drafter(tmp_path / "drafter", target)
    pair = {"target": str(target), "drafter": str(drafter), "max_seq_len": None}
    build(recipe.model_copy(update=pair), tmp_path / "out")
    assert inspect_build(tmp_path / "out")["recipe"]["max_seq_len"] == 48


def test_drafts_of_a_restricted_head_come_from_the_largest_logits_and_from_an_engine_of_its_own(
    recipe: BuildRecipe, copied: Path
) -> None:
    results = build(recipe.model_copy(update={"markov_top_n": 5}), copied)
    assert [result.stage for result in results if not result.was_built] == ["checkpoints"]
    drafter = load_deployment(copied).drafter
    rows = np.arange(2)
    uniforms = np.full((2, drafter.gamma), 0.5, np.float32)
    batch = DraftBatch(rows, anchor_ids=rows + 7, past_lengths=rows, temperatures=rows, uniforms=uniforms)
    logits = drafter.draft(batch).draft_logits
    assert (logits > EXCLUDED_LOGIT).sum(axis=-1).tolist() == [[5] * drafter.gamma] * 2


def test_smallest_rows_and_a_draft_vocabulary_of_one_id_build_and_draft(recipe: BuildRecipe, tmp_path: Path) -> None:
    """Rows of 16 positions hold no context of 128 to time; of one logit there is no second to take a margin from."""
    drafter = write_drafter(tmp_path / "drafter", Path(recipe.target), gamma=13, confidence=False)
    small = {"drafter": str(drafter), "draft_vocab": 1, "max_seq_len": 16, "max_batch_tokens": 64, "max_requests": 4}
    build(recipe.model_copy(update=small), tmp_path / "build")
    deployment = load_deployment(tmp_path / "build")
    block = deployment.drafter.draft(
        DraftBatch(
            rows=np.array([0]),
            anchor_ids=np.array([5]),
            past_lengths=np.array([0]),
            temperatures=np.ones(1, np.float32),
            uniforms=np.full((1, 13), 0.5, np.float32),
        )
    )
    assert len(set(block.draft_ids.ravel().tolist())) == 1
    np.testing.assert_array_equal(block.confidence_logits, np.asarray(block.draft_logits)[..., 0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"markov_top_n": 320}, "markov_top_n: expected less than the drafter's vocabulary of 320, found 320"),
        ({"max_seq_len": 400}, "max_seq_len 400 is beyond the 300 positions that the drafter was made for"),
    ],
)
def test_what_does_not_fit_the_drafter_is_refused_before_anything_is_written(
    recipe: BuildRecipe, tmp_path: Path, given: dict[str, int], message: str
) -> None:
    short = {"max_position_embeddings": 300}
    drafter = write_drafter(tmp_path / "drafter", Path(recipe.target), config_extra=short)
    told = []
    with pytest.raises(ExportError, match=message):
        build(
            recipe.model_copy(update={"drafter": str(drafter), **given}),
            tmp_path / "out",
            progress=lambda stage, fraction: told.append((stage, fraction)),
        )
    assert told == []
    assert not (tmp_path / "out").exists()


def test_unfinished_build_tells_what_it_holds(recipe: BuildRecipe, copied: Path) -> None:
    (copied / "manifest.json").unlink()
    shutil.rmtree(copied / "steptable")
    for refused in (load_deployment, inspect_build):
        with pytest.raises(
            ManifestError, match=r"not a finished build: .*found checkpoints, graphs, engines \(for CPU\); run"
        ):
            refused(copied)
    assert [result.stage for result in build(recipe, copied) if result.was_built] == ["steptable"]


@pytest.mark.parametrize(
    ("family", "given", "expected"),
    [
        ("qwen3", {}, {"enable_thinking": False}),
        ("qwen3", {"enable_thinking": True}, {"enable_thinking": True}),
        ("llama", {}, {}),
    ],
)
def test_qwen3_chats_do_not_think_unless_asked(
    tmp_path: Path, family: Any, given: dict[str, bool], expected: dict[str, bool]
) -> None:
    target = write_target(tmp_path / "target", family=family, vocab_size=320, head_dim=16, tokenizer=True)
    drafter = write_drafter(tmp_path / "drafter", target)
    build(BuildRecipe(target=str(target), drafter=str(drafter), chat_template_kwargs=given, **LIMITS), tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "checkpoints" / "tokenizer" / "text.json").read_text())
    assert settings["chat_template_kwargs"] == expected


def test_inspect_tells_the_whole_chain(finished: Path) -> None:
    description = inspect_build(finished, verify=True)
    assert json.loads(json.dumps(description)) == description
    assert set(description["stages"]) == {stage.name for stage in STAGES}
    assert description["step_table"]["step_ms"]
    inputs = description["stages"]["checkpoints"]["inputs"]
    assert any(path.endswith("model.safetensors") for path in inputs)
