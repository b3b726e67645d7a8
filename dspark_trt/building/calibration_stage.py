"""The calibration of a build: measured on the engines that serve, or read from a given file.

Nothing here reads a checkpoint, so a build that was moved without them can be calibrated again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_trt.building.context import Context
from dspark_trt.building.loops import UnpricedLoops
from dspark_trt.calibration.file import CALIBRATION_FILE, CalibrationFile
from dspark_trt.calibration.given import read_given
from dspark_trt.calibration.prompts import Prompt, packaged_prompts
from dspark_trt.calibration.record import Recorder
from dspark_trt.calibration.run import MAX_TOKENS, calibrate, fit_recorded
from dspark_trt.checkpoints.spec import NgramSpec
from dspark_trt.checkpoints.spec_json import read_draft_source, target_spec_from_json
from dspark_trt.engines.open import open_engines
from dspark_trt.log import Progress
from dspark_trt.text import TextCodec

BUDGET_S = 45.0  # of a build


def calibration_settings(context: Context) -> dict[str, Any]:
    return {"budget_s": BUDGET_S} if context.recipe.calibration is None else {}


def calibration_inputs(context: Context) -> list[Path]:
    return [] if context.recipe.calibration is None else [context.recipe.calibration]


def make_calibration(context: Context, folder: Path, progress: Progress) -> None:
    """The file that the recipe gives, else what the packaged prompts show within the budget of a build."""
    given = context.recipe.calibration
    found = (
        measure(context, packaged_prompts(), budget_s=BUDGET_S, progress=progress)
        if given is None
        else given_for(context.output, given)
    )
    found.save(folder / CALIBRATION_FILE)


def measure(
    context: Context,
    prompts: Sequence[Prompt],
    *,
    budget_s: float,
    max_tokens: int = MAX_TOKENS,
    num_samples: int = 1,
    progress: Progress,
) -> CalibrationFile:
    """Decode the prompts with every draft verified, fit and measure (see calibration/run.py)."""
    build = context.output
    source = read_draft_source(build)
    make_loop, codec = recording_loops(
        build,
        use_cuda_graphs=context.recipe.uses_cuda_graphs,
        gpu_memory_utilization=context.recipe.gpu_memory_utilization,
    )
    return calibrate(
        make_loop,
        codec.encode_prompt,
        prompts,
        gamma=source.gamma,
        is_of_lookups=isinstance(source, NgramSpec),
        keeps_trajectories=source.kind == "lookahead",
        budget_s=budget_s,
        max_tokens=max_tokens,
        num_samples=num_samples,
        max_seq_len=context.limits.max_seq_len,
        progress=progress,
    )


def fit_to(build: Path, recorder: Recorder, prompts: Sequence[Prompt], effort: Mapping[str, Any]) -> CalibrationFile:
    """As `measure`, of what was recorded elsewhere on engines of this build."""
    source = read_draft_source(build)
    is_of_lookups = isinstance(source, NgramSpec)
    return fit_recorded(recorder, prompts, gamma=source.gamma, effort=effort, is_of_lookups=is_of_lookups)


def recording_loops(
    build: Path, *, use_cuda_graphs: bool, gpu_memory_utilization: float
) -> tuple[UnpricedLoops, TextCodec]:
    """Loops over the engines of a build whose calibration is not there yet, and its tokenizer.

    Raises as `open_engines`.
    """
    engines = open_engines(build, use_cuda_graphs=use_cuda_graphs, gpu_memory_utilization=gpu_memory_utilization)
    codec = TextCodec.load(build / "checkpoints" / "tokenizer")
    target = target_spec_from_json(json.loads((build / "checkpoints" / "target.json").read_text()))
    source = read_draft_source(build)
    loops = UnpricedLoops(
        engines.target,
        engines.drafter,
        codec.decode,
        target.eos_token_ids,
        engines.acceptance,
        engines.pages,
        num_trajectory_drafts=source.gamma if source.kind == "lookahead" else 0,
    )
    return loops, codec


def given_for(build: Path, path: Path, *, said_in: str = "calibration") -> CalibrationFile:
    """The calibration file at `path`, for what drafts in `build`. Raises ManifestError, and as `read_given`."""
    source = read_draft_source(build)
    return read_given(path, source.gamma, is_of_lookups=isinstance(source, NgramSpec), said_in=said_in)
