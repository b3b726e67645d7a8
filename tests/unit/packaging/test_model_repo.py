"""The model repository of a build: relative, movable, complete from a wheel, overlaid without being touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from dspark_trt.errors import ManifestError
from dspark_trt.packaging.model_repo import build_directory_of, model_parameters, overlay_model_repo, write_model_repo

SOURCES = Path(__file__).parents[3]


def triton_arguments(model: Path) -> dict[str, str]:
    """What Triton hands to `initialize` of a model in this folder."""
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    return {
        "model_config": json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)),
        "model_repository": str(model),
        "model_version": "1",
    }


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def build_dir(tmp_path: Path) -> Path:
    """A build directory whose repository was written elsewhere in it and renamed, as the build does."""
    build = tmp_path / "first place" / "build"
    write_model_repo(build, build / "unfinished")
    (build / "unfinished").rename(build / "triton_model_repo")
    return build


def test_configurations_to_read_in_the_sources_are_those_that_are_written(build_dir: Path) -> None:
    for config in (build_dir / "triton_model_repo").glob("*/config.pbtxt"):
        assert (SOURCES / "triton_model_repo" / config.parent.name / "config.pbtxt").read_text() == config.read_text()


def test_models_find_a_build_that_was_moved_as_a_whole(build_dir: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(build_dir, tmp_path / "second place")
    shutil.rmtree(build_dir)
    for name in ("preprocessing", "dspark"):
        assert build_directory_of(triton_arguments(moved / "triton_model_repo" / name)) == moved


def test_no_absolute_path_is_written(build_dir: Path, tmp_path: Path) -> None:
    for name, text in contents(build_dir).items():
        assert str(tmp_path) not in text, name


def test_a_build_opened_through_a_symlink_is_found(build_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(build_dir)
    arguments = triton_arguments(tmp_path / "link" / "triton_model_repo" / "dspark")
    assert build_directory_of(arguments) == build_dir


def overlaid(build_dir: Path, tmp_path: Path, **options: str) -> Path:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    overlay_model_repo(build_dir, overlay, **options)
    return overlay


def test_overlay_changes_how_it_is_served_and_nothing_in_the_build(build_dir: Path, tmp_path: Path) -> None:
    before = contents(build_dir)
    overlay = overlaid(build_dir, tmp_path, scheduler="off", admission='{"max_queue_s": 3}')
    assert contents(build_dir) == before
    arguments = triton_arguments(overlay / "dspark")
    assert model_parameters(arguments)["scheduler"] == "off"
    assert json.loads(model_parameters(arguments)["admission"]) == {"max_queue_s": 3}
    assert build_directory_of(arguments) == build_dir
    for name in ("ensemble", "postprocessing"):
        assert contents(overlay / name) == contents(build_dir / "triton_model_repo" / name)


def test_overlay_keeps_the_scheduler_and_the_name_that_the_build_gave(tmp_path: Path) -> None:
    repository = tmp_path / "build" / "triton_model_repo"
    write_model_repo(tmp_path / "build", repository, engine_model_name="tensorrt_llm", scheduler="fixed:2")
    overlay = overlaid(tmp_path / "build", tmp_path)
    assert model_parameters(triton_arguments(overlay / "tensorrt_llm"))["scheduler"] == "fixed:2"


def test_nothing_that_somebody_put_into_a_builds_repository_is_served(build_dir: Path, tmp_path: Path) -> None:
    """A build is data where it can be: models, code and backends come from this package."""
    repository = build_dir / "triton_model_repo"
    shutil.copytree(repository / "postprocessing", repository / "evil")
    (repository / "preprocessing" / "1" / "model.py").write_text("import os; os.abort()\n")
    (repository / "dspark" / "1" / "tokenizers.py").write_text("raise SystemExit\n")
    config = repository / "dspark" / "config.pbtxt"
    config.write_text(
        config.read_text() + 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "/evil" } }\n'
    )
    overlay = overlaid(build_dir, tmp_path)
    assert {path.name for path in overlay.iterdir()} == {"ensemble", "preprocessing", "dspark", "postprocessing"}
    served = "".join(contents(overlay).values())
    assert "abort" not in served
    assert "/evil" not in served
    assert not list(overlay.rglob("tokenizers.py"))
    assert not any(path.is_symlink() for path in overlay.rglob("*"))


def test_a_folder_without_a_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="not a finished build"):
        overlay_model_repo(tmp_path, tmp_path)


def test_the_engine_code_is_the_same_under_either_name(tmp_path: Path) -> None:
    write_model_repo(tmp_path, tmp_path / "dspark_repo")
    write_model_repo(tmp_path, tmp_path / "trtllm_repo", engine_model_name="tensorrt_llm")
    code = (tmp_path / "dspark_repo" / "dspark" / "1" / "model.py").read_text()
    assert (tmp_path / "trtllm_repo" / "tensorrt_llm" / "1" / "model.py").read_text() == code


def test_a_wheel_holds_everything_a_repository_is_written_from(tmp_path: Path) -> None:
    sources = tmp_path / "sources"  # setuptools writes into the folder it builds from
    sources.mkdir()
    for name in ("dspark_trt", "plugins", "triton_model_repo"):
        shutil.copytree(SOURCES / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(SOURCES / name, sources)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, sources]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    script = (
        "import sys; from pathlib import Path; import dspark_trt.packaging.model_repo as packaging, "
        "dspark_trt_model_repo\nfor module in (packaging, dspark_trt_model_repo):\n"
        "    assert Path(module.__file__).is_relative_to(sys.argv[1]), module.__file__\n"
        "packaging.write_model_repo(Path(sys.argv[2]), Path(sys.argv[2]) / 'from_wheel')"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    subprocess.run([sys.executable, "-c", script, installed, tmp_path], check=True, env=environment, cwd=tmp_path)
    write_model_repo(tmp_path, tmp_path / "from_sources")
    assert contents(tmp_path / "from_wheel") == contents(tmp_path / "from_sources")
