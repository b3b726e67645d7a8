"""`--cuda-graphs off` arrives where engines are opened: for the step table, the calibration and serving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark_trt import deployment
from dspark_trt.building import calibration_stage, stages
from dspark_trt.building.context import Context
from dspark_trt.building.finished import read_finished
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.engines import open as registry
from dspark_trt.engines.settings import EngineSettings
from dspark_trt.engines.tensorrt import engines as tensorrt_engines
from dspark_trt.engines.tensorrt import library
from dspark_trt.machine.gpu import Gpu

L40S = Gpu("NVIDIA L40S", 89, 48_000_000_000, "CUDA 13.0")


class OpenedError(Exception):
    """Stands for engines: whoever opens them gets no further."""


def stop_at_opening(build: Path, *, use_cuda_graphs: bool = True, gpu_memory_utilization: float = 0.9) -> None:
    raise OpenedError(use_cuda_graphs, gpu_memory_utilization)


def of_step_table(context: Context) -> None:
    stages.measure_step_table(context, lambda fraction: None)


def of_calibration(context: Context) -> None:
    calibration_stage.measure(context, [], budget_s=1.0, progress=lambda fraction: None)


def of_serving(context: Context) -> None:
    deployment.load_deployment(context.output)


@pytest.mark.parametrize("choice", ["auto", "off"])
@pytest.mark.parametrize(
    ("module", "open_them"),
    [(stages, of_step_table), (calibration_stage, of_calibration), (deployment, of_serving)],
    ids=["step table", "calibration", "serving"],
)
def test_whoever_opens_engines_hands_the_choice_on(
    module: Any, open_them: Callable[[Context], None], choice: str, tiny_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, manifests = read_finished(tiny_build)
    recipe = summary.recipe.model_copy(update={"cuda_graphs": choice, "gpu_memory_utilization": 0.7})
    chosen = summary.model_copy(update={"recipe": recipe})
    monkeypatch.setattr(deployment, "read_finished", lambda build: (chosen, manifests))
    monkeypatch.setattr(module, "open_engines", stop_at_opening)
    with pytest.raises(OpenedError) as caught:
        open_them(Context(recipe, tiny_build))
    assert caught.value.args == (choice == "auto", 0.7)


@pytest.mark.parametrize("use_cuda_graphs", [True, False])
def test_the_choice_reaches_the_device_runtime(
    use_cuda_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engines").mkdir()
    settings = EngineSettings(backend="tensorrt_rtx", library_version="1.7.1", sms=(89,))
    (tmp_path / "engines" / "engine.json").write_text(settings.model_dump_json())
    monkeypatch.setattr(registry, "look_for_gpu", lambda: L40S)
    monkeypatch.setattr(registry, "device_runtime_lacks", lambda: iter(()))
    monkeypatch.setattr(library, "check_library", lambda name: "1.7.1")
    monkeypatch.setattr(
        tensorrt_engines, "open_tensorrt_engines", lambda build, settings, **options: stop_at_opening(build, **options)
    )
    with pytest.raises(OpenedError) as caught:
        registry.open_engines(tmp_path, use_cuda_graphs=use_cuda_graphs, gpu_memory_utilization=0.6)
    assert caught.value.args == (use_cuda_graphs, 0.6)


def test_a_step_table_is_of_calls_with_or_without_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else a table that was measured with them would price steps without."""
    recipes = [BuildRecipe(target="t", drafter="d", backend="tensorrt", cuda_graphs=each) for each in ("auto", "off")]
    monkeypatch.setattr("dspark_trt.building.context.look_for_gpu", lambda: L40S)
    (stage,) = (each for each in stages.STAGES if each.name == "steptable")
    assert stage.settings(Context(recipes[0], tmp_path)) != stage.settings(Context(recipes[1], tmp_path))
