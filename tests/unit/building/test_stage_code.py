"""Which stages an edit of the code makes again: those that it decides, and no others.
Keys tell, so no GPU is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_trt.building.build import stage_settings
from dspark_trt.building.context import Context
from dspark_trt.building.manifest import stage_key
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.building.stages import STAGES
from dspark_trt.checkpoints.spec_json import spec_to_json
from dspark_trt.checkpoints.target import read_target
from dspark_trt.machine.gpu import Gpu
from tests.support.factories import write_target

REPOSITORY = Path(__file__).parents[3]
LIMITS = {"max_requests": 2, "max_seq_len": 64, "max_batch_tokens": 32}
BEFORE_CALIBRATION = ("checkpoints", "graphs", "engines", "steptable")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def context_of(backend: str, target: Path, output: Path) -> Context:
    """A build for a CPU, or ahead of time for an L40S, whose checkpoints have been read."""
    (output / "checkpoints").mkdir()
    (output / "checkpoints" / "target.json").write_text(json.dumps(spec_to_json(read_target(str(target)).spec)))
    recipe = BuildRecipe(target=str(target), drafter="d", backend="onnxruntime", precision="fp32", **LIMITS)
    if backend == "tensorrt_rtx":
        changes = {"backend": backend, "precision": "bf16", "compute_capabilities": (89,)}
        recipe = recipe.model_copy(update=changes)
    return Context(recipe, output)


def keys(context: Context) -> dict[str, str]:
    found: dict[str, str] = {}
    for stage in STAGES:
        before = {name: found[name] for name in stage.predecessors}
        found[stage.name] = stage_key(stage.name, stage_settings(stage, context), before, {})
    return found


def edit(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = REPOSITORY / source, Path.read_bytes
    assert path.is_file()
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + (b"#" if p.resolve() == path.resolve() else b""))


ALL_FROM_GRAPHS = {"graphs", "engines", "steptable"}
ALL_FROM_ENGINES = {"engines", "steptable"}
TIMED_ON_A_GPU = [
    "dspark_trt/engines/device/target.py",
    "dspark_trt/engines/device/graphs.py",
    "dspark_trt/engines/device/calls.py",
    "dspark_trt/engines/tensorrt/session.py",
    "dspark_trt/engines/tensorrt/runtime.py",
    "dspark_trt/engines/row_groups.py",
]
READ = [
    "dspark_trt/checkpoints/spec/drafters.py",
    "dspark_trt/checkpoints/drafters/eagle3.py",
    "dspark_trt/checkpoints/dequantising/gptq.py",
]
WRITTEN = [
    "dspark_trt/building/drafter_choice.py",
    "dspark_trt/graphs/drafters/medusa.py",
    "dspark_trt/contract/model_bindings.py",
]


@pytest.mark.parametrize(
    ("backend", "source", "expected"),
    [
        *(("tensorrt_rtx", source, {"steptable"}) for source in TIMED_ON_A_GPU),
        ("tensorrt_rtx", "dspark_trt/engines/tensorrt/compiler/network.py", ALL_FROM_ENGINES),
        ("tensorrt_rtx", "dspark_trt/engines/tensorrt/compiler/facts.py", ALL_FROM_ENGINES),
        ("tensorrt_rtx", "plugins/markov_head/kernel.py", ALL_FROM_GRAPHS),
        ("tensorrt_rtx", "plugins/operation.py", ALL_FROM_GRAPHS),
        ("tensorrt_rtx", "plugins/acceptance/kernel.py", ALL_FROM_ENGINES),
        ("tensorrt_rtx", "dspark_trt/engines/device/acceptance.py", {"steptable"}),
        ("tensorrt_rtx", "dspark_trt/runtime/fused_acceptance.py", {"steptable"}),
        ("tensorrt_rtx", "dspark_trt/contract/bindings.py", ALL_FROM_GRAPHS),
        ("tensorrt_rtx", "dspark_trt/graphs/target.py", ALL_FROM_GRAPHS),
        ("tensorrt_rtx", "dspark_trt/engines/onnxruntime/session.py", set()),
        ("tensorrt_rtx", "dspark_trt/reference/sessions.py", set()),
        ("tensorrt_rtx", "dspark_trt/steptable/profile.py", {"steptable"}),
        ("onnxruntime", "dspark_trt/engines/onnxruntime/session.py", {"steptable"}),
        ("onnxruntime", "dspark_trt/engines/onnxruntime/memory.py", {"steptable"}),
        ("onnxruntime", "dspark_trt/engines/row_groups.py", {"steptable"}),
        ("onnxruntime", "dspark_trt/engines/device/graphs.py", set()),
        ("onnxruntime", "dspark_trt/engines/tensorrt/session.py", set()),
        ("onnxruntime", "dspark_trt/engines/tensorrt/compiler/network.py", set()),
        ("onnxruntime", "plugins/row_attention/function_body.py", ALL_FROM_GRAPHS),
        ("onnxruntime", "dspark_trt/checkpoints/gguf_store.py", {"checkpoints", *ALL_FROM_GRAPHS}),
        *(("onnxruntime", source, {"checkpoints", *ALL_FROM_GRAPHS}) for source in READ),
        *(("onnxruntime", source, ALL_FROM_GRAPHS) for source in WRITTEN),
        ("onnxruntime", "plugins/acceptance/kernel.py", set()),
        ("onnxruntime", "dspark_trt/engines/onnxruntime/language_model.py", {"steptable"}),
        ("onnxruntime", "dspark_trt/runtime/prefix_cache.py", {"steptable"}),
        ("onnxruntime", "dspark_trt/calibration/fit.py", set()),
        ("onnxruntime", "dspark_trt/runtime/acceptance.py", {"steptable"}),
        ("onnxruntime", "dspark_trt/commands/doctor.py", set()),
    ],
)
def test_edit_makes_the_stages_again_that_it_decides_and_no_others(
    backend: str, source: str, expected: set[str], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU an edit of what runs an engine measures again and compiles nothing; one of the compiler compiles."""
    gpu = Gpu(name="NVIDIA L40S", sm=89, memory_bytes=48 << 30, driver="580.65.06")
    monkeypatch.setattr("dspark_trt.building.context.look_for_gpu", lambda: gpu)
    context = context_of(backend, target, tmp_path)
    before = keys(context)
    edit(source, monkeypatch)
    after = keys(context)
    assert {name for name in BEFORE_CALIBRATION if before[name] != after[name]} == expected
