"""The stages of a build, in order: what decides each one, what it comes after, and how it is made."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_trt.building.calibration_stage import calibration_inputs, calibration_settings, make_calibration
from dspark_trt.building.checkpoints_stage import checkpoint_inputs, checkpoint_settings, make_checkpoints
from dspark_trt.building.context import Context
from dspark_trt.building.drafter_graphs import write_drafter
from dspark_trt.building.host_time import with_host_time
from dspark_trt.building.interrupts import deferred_interrupt
from dspark_trt.building.loops import UnpricedLoops
from dspark_trt.building.target_form import write_target
from dspark_trt.checkpoints.spec_json import read_draft_source
from dspark_trt.engines.open import open_engines
from dspark_trt.engines.settings import ENGINE_FILE, ENGINE_FOLDER
from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.graphs.heads import check_top_n
from dspark_trt.graphs.limits import check_limits
from dspark_trt.graphs.quantize import largest_integer
from dspark_trt.graphs.select import write_select_graph
from dspark_trt.log import Progress
from dspark_trt.machine import cpu
from dspark_trt.machine.gpu import Gpu
from dspark_trt.machine.packages import DEVICE_DISTRIBUTIONS, installed_versions
from dspark_trt.packaging.model_repo import write_model_repo
from dspark_trt.steptable.profile import profile
from dspark_trt.steptable.table import StepTable
from dspark_trt.text import TextCodec

# An engine on a device runs a new kind of call once as it is, then records a CUDA graph of it, then plays that
NUM_WARM_UPS_ON_A_DEVICE = 3


# What writes the custom nodes of graphs. Acceptance is no node: engines have its kernels.
NODES = tuple(f"dspark_trt_plugins.{name}" for name in ("*", "markov_head", "prefix_select", "row_attention"))


@dataclass(frozen=True, slots=True)
class Stage:
    """One link of the chain."""

    name: str
    predecessors: tuple[str, ...]
    packages: Callable[[Context], tuple[str, ...]]  # whose code decides what is written; other code: made again
    settings: Callable[[Context], dict[str, Any]]
    make: Callable[[Context, Path, Progress], None]
    inputs: Callable[[Context], list[Path]] = lambda context: []


def _make_graphs(context: Context, folder: Path, progress: Progress) -> None:
    drafter, limits, is_on_device = context.drafter, context.limits, context.is_on_device
    if drafter is not None:  # what does not fit it is said before the target's weights are written
        check_limits(limits, drafter.spec.decoder, gamma=drafter.spec.gamma, what="drafter")
        check_top_n(drafter.spec.num_draft_ids, context.recipe.markov_top_n or 0)
    write_target(context, folder, lambda fraction: progress(0.3 * fraction))
    if drafter is None:
        return
    progress(0.3)
    write_drafter(context, drafter, folder, lambda fraction: progress(0.3 + 0.7 * fraction))
    if is_on_device:
        write_select_graph(drafter.spec, folder, limits=limits, precision=context.precision)


def _make_engines(context: Context, folder: Path, progress: Progress) -> None:
    """ONNX Runtime compiles when a session opens: of it, what is kept is how to open it."""
    settings = context.engine_settings
    if settings.backend != "onnxruntime":
        from dspark_trt.engines.tensorrt.compiler.acceptance import compile_acceptance
        from dspark_trt.engines.tensorrt.compiler.build import TIMING_CACHE, CompileSettings, compile_graphs

        compile_settings = CompileSettings(
            settings.backend,
            context.recipe.compute_capabilities,
            known_timings=context.output / ENGINE_FOLDER / TIMING_CACHE,
            gpu_memory_utilization=context.recipe.gpu_memory_utilization,
        )
        with deferred_interrupt() as check_interrupt:

            def report(fraction: float) -> None:
                check_interrupt()
                progress(fraction)

            compile_graphs(context.output / "graphs", folder, compile_settings, progress=report)
            compile_acceptance(context.output / "graphs", folder, compile_settings)
    (folder / ENGINE_FILE).write_text(json.dumps(settings.model_dump(), indent=1) + "\n")


def _make_steptable(context: Context, folder: Path, progress: Progress) -> None:
    measure_step_table(context, progress).save(folder / "step_table.json")


def measure_step_table(context: Context, progress: Progress, budget_s: float = math.inf) -> StepTable:
    """The table of a build whose engines are there, of this machine; `budget_s` as in `profile`.

    Raises EnvironmentMissingError where the engines' GPU is not.
    """
    _check_can_measure(context)
    engines = open_engines(
        context.output,
        use_cuda_graphs=context.recipe.uses_cuda_graphs,
        gpu_memory_utilization=context.recipe.gpu_memory_utilization,
    )
    table = profile(
        engines.target,
        engines.drafter,
        gamma=read_draft_source(context.output).gamma,
        provenance=measured_with(context) | {"precision": context.precision},
        progress=progress,
        acceptance=engines.acceptance,
        synchronize=engines.synchronize,
        num_warm_ups=NUM_WARM_UPS_ON_A_DEVICE if context.is_on_device else 1,
        is_padded=context.is_on_device,
        num_threads=1 if context.is_on_device else context.recipe.num_threads or cpu.num_cores(),
        budget_s=budget_s,
    )
    codec = TextCodec.load(context.output / "checkpoints" / "tokenizer")
    return with_host_time(
        table,
        UnpricedLoops(
            engines.target, engines.drafter, codec.decode, acceptance=engines.acceptance, pages=engines.pages
        ),
    )


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
    """The machine that a step table is for, and how calls are made there."""
    here: dict[str, Any] = {"host": cpu.fingerprint()}
    if context.is_on_device:
        here["gpu"] = asdict(context.gpu) if isinstance(context.gpu, Gpu) else None
        here["cuda_graphs"] = context.recipe.cuda_graphs
    return here


def measured_with(context: Context) -> dict[str, Any]:
    """What the times of a step table depend on besides the engines' files."""
    packages = DEVICE_DISTRIBUTIONS if context.is_on_device else ("onnxruntime",)
    here = _measured_on(context) | {"backend": context.recipe.backend, "versions": installed_versions(*packages)}
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
        settings=checkpoint_settings,
        make=make_checkpoints,
        inputs=checkpoint_inputs,
    ),
    Stage(
        name="graphs",
        predecessors=("checkpoints",),
        # a graph's inputs and outputs are those of the contract, and the plugins write the bodies of its nodes;
        # the forms of target and drafter are chosen by code of this room
        packages=lambda context: (
            *("dspark_trt.graphs", "dspark_trt.contract", *NODES),
            *(() if context.is_on_device else ("dspark_trt.building.target_*", "dspark_trt.building.activation_*")),
            *(
                ()
                if context.is_on_device or not context.recipe.has_drafter_model
                else ("dspark_trt.building.drafter_*",)
            ),
        ),
        settings=lambda context: {
            "precision": context.precision,
            "limits": asdict(context.limits),
            "draft_vocab": context.recipe.draft_vocab,
            "drafter_precision": context.recipe.drafter_precision,
            "markov_top_n": context.recipe.markov_top_n,
            "is_on_device": context.is_on_device,
            "largest_integer": None if context.is_on_device else largest_integer(),
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
