"""A GPU build from checkpoints to tokens, with PyTorch in the place of the one part that cannot run here:
TensorRT's execution.

Graphs, compiled engines, manifests, step table, repository, deployment and loop are real, and the device runtime runs
on the CPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.building import backends, context
from dspark_trt.building.build import build
from dspark_trt.building.manifest import STAGE_NAMES
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.target import read_target
from dspark_trt.commands.generation import generate
from dspark_trt.commands.inspect import inspect_build
from dspark_trt.contract.protocol import DraftBatch, EngineLimits, SelectBatch, SelectedOutput, TargetBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.deployment import load_deployment
from dspark_trt.engines import open as registry
from dspark_trt.engines.device.engines import DeviceEngines
from dspark_trt.engines.settings import EngineSettings
from dspark_trt.engines.tensorrt import engines as tensorrt_engines
from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.machine.gpu import Gpu, NoGpu
from dspark_trt.reference.on_device import open_device_reference_engines
from dspark_trt.runtime.request import GenerationRequest
from tests.support.factories import write_drafter, write_target

LIMITS = {"max_requests": 2, "max_seq_len": 64, "max_batch_tokens": 32}
L40S = Gpu("NVIDIA L40S", 89, 48_000_000_000, "CUDA 13.0")
RTX_6000 = Gpu("NVIDIA RTX 6000 Ada Generation", 89, 48_000_000_000, "CUDA 13.0")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> BuildRecipe:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", vocab_size=320, head_dim=16, tokenizer=True)
    drafter = write_drafter(folder / "drafter", target)
    return BuildRecipe(target=str(target), drafter=str(drafter), backend="tensorrt_rtx", **LIMITS)


@pytest.fixture(scope="module")
def host(recipe: BuildRecipe) -> Iterator[Callable[[Gpu | NoGpu], None]]:
    """A host with this GPU, torch for CUDA, and engines that PyTorch computes,
    in float32 so that greedy text is stable."""

    def open_in_torch(
        build_dir: Path, settings: EngineSettings, *, use_cuda_graphs: bool, gpu_memory_utilization: float
    ) -> DeviceEngines:
        assert use_cuda_graphs, "the recipe says nothing else"
        assert gpu_memory_utilization == 0.9
        target = read_target(recipe.target)
        drafter = read_drafter(recipe.drafter, target)
        limits = EngineLimits(**LIMITS)
        return open_device_reference_engines(target, drafter, limits=limits, precision="fp32", device="cpu")

    with pytest.MonkeyPatch.context() as patch:

        def be(gpu: Gpu | NoGpu) -> None:
            for module in (backends, context, registry):
                patch.setattr(module, "look_for_gpu", lambda: gpu)

        for module in (backends, registry):
            patch.setattr(module, "device_runtime_lacks", lambda: iter(()))
        patch.setattr(tensorrt_engines, "open_tensorrt_engines", open_in_torch)
        yield be


@pytest.fixture(scope="module")
def finished(recipe: BuildRecipe, host: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled where there is no GPU, completed where it serves."""
    output = tmp_path_factory.mktemp("build") / "out"
    host(NoGpu("no driver", "get one"))
    with pytest.raises(EnvironmentMissingError, match="here is no GPU"):
        build(recipe.model_copy(update={"compute_capabilities": (89,)}), output)
    host(L40S)
    results = build(recipe, output)  # the compute capability is that of the GPU there
    assert [result.stage for result in results if not result.was_built] == ["checkpoints", "graphs", "engines"]
    return output


def test_directory_is_that_of_the_cpu_path_and_says_what_it_is_for(finished: Path) -> None:
    description = inspect_build(finished, verify=True)
    assert tuple(description["stages"]) == STAGE_NAMES
    assert description["device"] == "GPUs of SM 89"
    assert description["recipe"]["precision"] == "bf16"
    assert {"target.engine", "drafter_draft.engine"} <= set(description["stages"]["engines"]["outputs"])
    table = description["step_table"]
    assert table["provenance"]["gpu"]["name"] == "NVIDIA L40S"
    assert "torch" in table["provenance"]["versions"]
    assert np.min(np.array(table["draft_ms"])[..., -1]) > 0  # of whole blocks; none costs nothing
    scheduler = (finished / "triton_model_repo" / "dspark" / "config.pbtxt").read_text()
    assert "auto" in scheduler


def test_step_table_is_measured_again_on_another_gpu_and_engines_are_kept(
    recipe: BuildRecipe, finished: Path, host: Any, tmp_path: Path
) -> None:
    output = shutil.copytree(finished, tmp_path / "copy")
    host(RTX_6000)
    results = build(recipe, output)
    assert [result.stage for result in results if result.was_built] == ["steptable"]


class CountedSteps:
    """Passes calls on."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.num_calls = 0

    def draft_and_verify(self, draft: DraftBatch, select: SelectBatch, plain: TargetBatch) -> SelectedOutput:
        self.num_calls += 1
        output: SelectedOutput = self._engine.draft_and_verify(draft, select, plain)
        return output


def test_deployment_decodes_in_fused_steps_what_it_decodes_without_drafts(finished: Path, host: Any) -> None:
    host(L40S)
    deployment = load_deployment(finished)
    steps = CountedSteps(deployment.step)
    deployment = replace(deployment, step=steps)
    prompts = [deployment.codec.encode(text) for text in ("the quick brown fox", "a", "to be or not to be")]
    sampling = deployment.sampling_params(max_tokens=16, temperature=0.0, ignore_eos=True)
    texts = {}
    for mode in ("off", "early_stop", "lagged_budget"):
        assert steps.num_calls == 0
        results = generate(deployment, prompts, sampling, SchedulerConfig(mode))  # type: ignore[arg-type]
        texts[mode] = [result["token_ids"] for result in results]
    assert steps.num_calls > 0
    assert texts["early_stop"] == texts["lagged_budget"] == texts["off"]


def test_wrapped_engines_see_every_call(finished: Path, host: Any) -> None:
    """A fused step would go past what a measurement wraps."""
    host(L40S)
    deployment = load_deployment(finished)
    steps = CountedSteps(deployment.step)
    deployment = replace(deployment, step=steps)
    loop = deployment.make_loop(SchedulerConfig("lagged_budget"), target=deployment.target)
    sampling = deployment.sampling_params(max_tokens=8, temperature=0.0, ignore_eos=True)
    loop.submit(GenerationRequest(request_id="0", prompt_ids=(5, 6, 7), sampling=sampling))
    while loop.has_work:
        loop.step()
    assert steps.num_calls == 0
