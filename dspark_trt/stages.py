"""The stages of a build, in order: what decides each one, what it comes after, and how it is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dspark_trt import host
from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.layout import check_finite
from dspark_trt.checkpoints.locate import locate, source_files
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.checkpoints.spec_json import spec_to_json, target_spec_from_json
from dspark_trt.checkpoints.target import read_target
from dspark_trt.checkpoints.tokenizer import write_tokenizer
from dspark_trt.engines.protocol import EngineLimits
from dspark_trt.engines.registry import ENGINE_FILE, EngineSettings, open_engines
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.graphs.target import write_target_graph
from dspark_trt.packaging.model_repo import write_model_repo
from dspark_trt.recipe import BuildRecipe
from dspark_trt.steptable.profile import profile

StageProgress = Callable[[float], None]

DEFAULT_MAX_SEQ_LEN = 4096
# DeepSpec's Qwen3 drafters were trained on answers without thinking; `--chat-template-kwargs` wins
DEFAULT_TEMPLATE_KWARGS: dict[str, dict[str, Any]] = {"qwen3": {"enable_thinking": False}}


class Context:
    """What the stages share: the recipe and, read only where a stage has to be made, the two checkpoints."""

    def __init__(self, recipe: BuildRecipe, output: Path) -> None:
        self.recipe = recipe
        self.output = output

    @cached_property
    def target(self) -> TargetCheckpoint:
        return read_target(self.recipe.target, self.recipe.target_revision)

    @cached_property
    def drafter(self) -> DrafterCheckpoint:
        drafter = read_drafter(self.recipe.drafter, self.target, self.recipe.drafter_revision)
        check_pairing(self.target, drafter)
        return drafter

    @cached_property
    def limits(self) -> EngineLimits:
        """Read after the stage `checkpoints`, whose target.json tells the target's own limit."""
        recipe = self.recipe
        spec = target_spec_from_json(json.loads((self.output / "checkpoints" / "target.json").read_text()))
        max_seq_len = recipe.max_seq_len or min(DEFAULT_MAX_SEQ_LEN, spec.decoder.max_position_embeddings)
        return EngineLimits(recipe.max_slots, max_seq_len, recipe.max_batch_tokens)


@dataclass(frozen=True, slots=True)
class Stage:
    """One link of the chain."""

    name: str
    predecessors: tuple[str, ...]
    packages: tuple[str, ...]  # whose code decides what is written: another version of it makes the stage again
    settings: Callable[[Context], dict[str, Any]]
    make: Callable[[Context, Path, StageProgress], None]
    inputs: Callable[[Context], list[Path]] = lambda context: []


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")


def _checkpoint_inputs(context: Context) -> list[Path]:
    recipe = context.recipe
    target = source_files(locate(recipe.target, recipe.target_revision))
    return [*target, *source_files(locate(recipe.drafter, recipe.drafter_revision))]


def _make_checkpoints(context: Context, folder: Path, progress: StageProgress) -> None:
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


def _make_graphs(context: Context, folder: Path, progress: StageProgress) -> None:
    target, drafter, precision = context.target, context.drafter, context.recipe.precision
    write_target_graph(
        target,
        folder,
        taps=drafter.spec.target_layer_ids,
        limits=context.limits,
        gamma=drafter.spec.gamma,
        precision=precision,
        attention="gqa",
    )
    progress(0.8)
    write_drafter_graphs(target, drafter, folder, limits=context.limits, precision=precision, attention="drafter")


def _engine_settings(context: Context) -> dict[str, Any]:
    return EngineSettings(backend="onnxruntime", num_threads=context.recipe.num_threads).model_dump()


def _make_engines(context: Context, folder: Path, progress: StageProgress) -> None:
    """ONNX Runtime compiles when a session opens: what is kept is how to open it."""
    _write_json(folder / ENGINE_FILE, _engine_settings(context))


def _make_steptable(context: Context, folder: Path, progress: StageProgress) -> None:
    target, drafter = open_engines(context.output)
    spec = context.drafter.spec
    table = profile(
        target,
        drafter,
        tap_width=spec.num_taps * spec.decoder.hidden_size,
        provenance={"host": host.fingerprint(), "precision": context.recipe.precision},
        progress=progress,
    )
    table.save(folder / "step_table.json")


def _make_calibration(context: Context, folder: Path, progress: StageProgress) -> None:
    gamma = context.drafter.spec.gamma
    _write_json(folder / "temperatures.json", {"kind": "neutral", "temperatures": [1.0] * gamma})


def _make_model_repo(context: Context, folder: Path, progress: StageProgress) -> None:
    write_model_repo(
        context.output,
        folder,
        engine_model_name=context.recipe.engine_model_name,
    )


STAGES = (
    Stage(
        name="checkpoints",
        predecessors=(),
        packages=("dspark_trt.checkpoints",),
        settings=lambda context: {"chat_template_kwargs": context.recipe.chat_template_kwargs},
        make=_make_checkpoints,
        inputs=_checkpoint_inputs,
    ),
    Stage(
        name="graphs",
        predecessors=("checkpoints",),
        packages=("dspark_trt.graphs", "dspark_trt_plugins.markov_head"),
        settings=lambda context: {"precision": context.recipe.precision, "limits": asdict(context.limits)},
        make=_make_graphs,
    ),
    Stage(
        name="engines",
        predecessors=("graphs",),
        packages=("dspark_trt.engines",),
        settings=_engine_settings,
        make=_make_engines,
    ),
    Stage(
        name="steptable",
        predecessors=("engines",),
        packages=("dspark_trt.steptable",),
        settings=lambda context: {"host": host.fingerprint()},
        make=_make_steptable,
    ),
    Stage(
        name="calibration",
        predecessors=("engines",),
        packages=(),
        settings=lambda context: {"kind": "neutral"},
        make=_make_calibration,
    ),
    Stage(
        name="triton_model_repo",
        predecessors=("engines",),
        packages=("dspark_trt.packaging", "dspark_trt_model_repo"),
        settings=lambda context: {"engine_model_name": context.recipe.engine_model_name},
        make=_make_model_repo,
    ),
)
