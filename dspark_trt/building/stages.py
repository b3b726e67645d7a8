"""The stages of a build, in order: what decides each one, what it comes after, and how it is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_trt.building.calibration_stage import calibration_inputs, calibration_settings, make_calibration
from dspark_trt.building.context import Context
from dspark_trt.building.drafter_graphs import write_drafter
from dspark_trt.building.host_time import with_host_time
from dspark_trt.building.interrupts import deferred_interrupt
from dspark_trt.building.loops import UnpricedLoops
from dspark_trt.building.trial import try_text
from dspark_trt.checkpoints.layout import check_finite
from dspark_trt.checkpoints.locate import locate, source_files
from dspark_trt.checkpoints.spec_json import spec_to_json
from dspark_trt.checkpoints.tokenizer import write_tokenizer
from dspark_trt.engines.open import open_engines
from dspark_trt.engines.settings import ENGINE_FILE, ENGINE_FOLDER
from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.graphs.heads import check_top_n
from dspark_trt.graphs.limits import check_limits
from dspark_trt.graphs.select import write_select_graph
from dspark_trt.graphs.target import write_target_graph
from dspark_trt.log import Progress
from dspark_trt.machine import cpu
from dspark_trt.machine.gpu import Gpu
from dspark_trt.machine.packages import DEVICE_DISTRIBUTIONS, installed_versions
from dspark_trt.packaging.model_repo import write_model_repo
from dspark_trt.steptable.profile import profile
from dspark_trt.text import TextCodec

# An engine on a device runs a new kind of call once as it is, then records a CUDA graph of it, then plays that
NUM_WARM_UPS_ON_A_DEVICE = 3
# DeepSpec's Qwen3 drafters were trained on answers without thinking; `--chat-template-kwargs` wins
DEFAULT_TEMPLATE_KWARGS: dict[str, dict[str, Any]] = {"qwen3": {"enable_thinking": False}}


@dataclass(frozen=True, slots=True)
class Stage:
    """One link of the chain."""

    name: str
    predecessors: tuple[str, ...]
    packages: Callable[[Context], tuple[str, ...]]  # whose code decides what is written; other code: made again
    settings: Callable[[Context], dict[str, Any]]
    make: Callable[[Context, Path, Progress], None]
    inputs: Callable[[Context], list[Path]] = lambda context: []


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")


def _checkpoint_inputs(context: Context) -> list[Path]:
    recipe = context.recipe
    target = source_files(locate(recipe.target, recipe.target_revision))
    return [*target, *source_files(locate(recipe.drafter, recipe.drafter_revision))]


def _make_checkpoints(context: Context, folder: Path, progress: Progress) -> None:
    recipe = context.recipe
    _write_json(folder / "target.json", spec_to_json(context.target.spec))
    _write_json(folder / "drafter.json", spec_to_json(context.drafter.spec))
    progress(0.3)
    check_finite(context.target.weights, recipe.target)
    check_finite(context.drafter.weights, recipe.drafter)
    progress(0.7)
    write_tokenizer(
        recipe.target,
        folder / "tokenizer",
        revision=recipe.target_revision,
        chat_template_kwargs=DEFAULT_TEMPLATE_KWARGS.get(context.target.spec.family, {}) | recipe.chat_template_kwargs,
    )
    try_text(folder / "tokenizer", recipe.target)


def _make_graphs(context: Context, folder: Path, progress: Progress) -> None:
    target, drafter, precision = context.target, context.drafter, context.precision
    limits, is_on_device = context.limits, context.is_on_device
    # what does not fit the drafter is said before the target's weights are written
    check_limits(limits, drafter.spec.decoder, gamma=drafter.spec.gamma, what="drafter")
    check_top_n(drafter.spec.decoder.vocab_size, context.recipe.markov_top_n or 0)
    write_target_graph(
        target,
        folder,
        taps=drafter.spec.target_layer_ids,
        limits=limits,
        gamma=drafter.spec.gamma,
        precision=precision,
        attention="standard" if is_on_device else "gqa",
    )
    progress(0.3)
    write_drafter(context, folder, lambda fraction: progress(0.3 + 0.7 * fraction))
    if is_on_device:
        write_select_graph(drafter.spec, folder, limits=limits, precision=precision)


def _make_engines(context: Context, folder: Path, progress: Progress) -> None:
    """ONNX Runtime compiles when a session opens: of it, what is kept is how to open it."""
    settings = context.engine_settings
    if settings.backend != "onnxruntime":
        from dspark_trt.engines.tensorrt.compiler.build import TIMING_CACHE, CompileSettings, compile_graphs

        compile_settings = CompileSettings(
            settings.backend,
            context.recipe.compute_capabilities,
            known_timings=context.output / ENGINE_FOLDER / TIMING_CACHE,
        )
        with deferred_interrupt() as check_interrupt:

            def report(fraction: float) -> None:
                check_interrupt()
                progress(fraction)

            compile_graphs(context.output / "graphs", folder, compile_settings, progress=report)
    _write_json(folder / ENGINE_FILE, settings.model_dump())


def _make_steptable(context: Context, folder: Path, progress: Progress) -> None:
    _check_can_measure(context)
    engines = open_engines(context.output)
    table = profile(
        engines.target,
        engines.drafter,
        provenance=measured_with(context) | {"precision": context.precision},
        progress=progress,
        synchronize=engines.synchronize,
        num_warm_ups=NUM_WARM_UPS_ON_A_DEVICE if context.is_on_device else 1,
        is_padded=context.is_on_device,
    )
    codec = TextCodec.load(context.output / "checkpoints" / "tokenizer")
    with_host_time(table, UnpricedLoops(engines.target, engines.drafter, codec.decode)).save(folder / "step_table.json")


def _check_can_measure(context: Context) -> None:
    """Raises EnvironmentMissingError after an ahead-of-time build for a GPU that is not here."""
    settings, gpu = context.engine_settings, context.gpu
    if settings.backend == "onnxruntime" or (isinstance(gpu, Gpu) and settings.is_for(gpu)):
        return
    raise EnvironmentMissingError(
        f"{context.output} has checkpoints, graphs and engines for {settings.device} now; the step table is measured "
        f"on the GPU that serves, and here is {gpu}. Run the same command there, on this directory or a copy of it: "
        "what is there is kept"
    )


def _measured_on(context: Context) -> dict[str, Any]:
    """The machine that a step table is for."""
    here: dict[str, Any] = {"host": cpu.fingerprint()}
    if context.is_on_device:
        here["gpu"] = asdict(context.gpu) if isinstance(context.gpu, Gpu) else None
    return here


def measured_with(context: Context) -> dict[str, Any]:
    """What the times of a step table depend on besides the engines' files."""
    packages = DEVICE_DISTRIBUTIONS if context.is_on_device else ("onnxruntime",)
    here = _measured_on(context) | {"versions": installed_versions(*packages)}
    if not context.is_on_device:
        here["num_threads"] = context.recipe.num_threads or cpu.num_cores()
    return here


def _make_model_repo(context: Context, folder: Path, progress: Progress) -> None:
    write_model_repo(
        context.output,
        folder,
        engine_model_name=context.recipe.engine_model_name,
        scheduler=context.recipe.scheduler,
    )


def _timed_code(context: Context) -> tuple[str, ...]:
    """The rooms whose code runs between a call of an engine and its answer: what a step table has measured."""
    shared = "dspark_trt.engines.*"
    if context.is_on_device:
        return (shared, "dspark_trt.engines.device", "dspark_trt.engines.tensorrt.*")
    return (shared, "dspark_trt.engines.onnxruntime")


STAGES = (
    Stage(
        name="checkpoints",
        predecessors=(),
        packages=lambda context: ("dspark_trt.checkpoints",),
        settings=lambda context: {"chat_template_kwargs": context.recipe.chat_template_kwargs},
        make=_make_checkpoints,
        inputs=_checkpoint_inputs,
    ),
    Stage(
        name="graphs",
        predecessors=("checkpoints",),
        # a graph's inputs and outputs are those of the contract, and the plugins write their function bodies
        # the drafter's form is chosen by code of this room
        packages=lambda context: (
            *("dspark_trt.graphs", "dspark_trt.contract", "dspark_trt_plugins"),
            *(() if context.is_on_device else ("dspark_trt.building.drafter_*",)),
        ),
        settings=lambda context: {
            "precision": context.precision,
            "limits": asdict(context.limits),
            "draft_vocab": context.recipe.draft_vocab,
            "drafter_precision": context.recipe.drafter_precision,
            "markov_top_n": context.recipe.markov_top_n,
            "is_on_device": context.is_on_device,
        },
        make=_make_graphs,
    ),
    Stage(
        name="engines",
        predecessors=("graphs",),
        # an engine takes long to compile, so code that only runs it does not count; kernels of the plugins are a part
        # of it
        packages=lambda context: (
            ("dspark_trt.engines.tensorrt.compiler", "dspark_trt_plugins") if context.is_on_device else ()
        ),
        settings=lambda context: context.engine_settings.model_dump(mode="json"),
        make=_make_engines,
    ),
    Stage(
        name="steptable",
        predecessors=("engines",),
        packages=lambda context: ("dspark_trt.steptable", "dspark_trt.runtime", *_timed_code(context)),
        settings=_measured_on,
        make=_make_steptable,
    ),
    Stage(
        name="calibration",
        predecessors=("engines",),
        packages=lambda context: ("dspark_trt.calibration",),
        settings=calibration_settings,
        make=make_calibration,
        inputs=calibration_inputs,
    ),
    Stage(
        name="triton_model_repo",
        predecessors=("engines",),
        packages=lambda context: ("dspark_trt.packaging", "dspark_trt_model_repo"),
        settings=lambda context: {
            "engine_model_name": context.recipe.engine_model_name,
            "scheduler": context.recipe.scheduler,
        },
        make=_make_model_repo,
    ),
)
