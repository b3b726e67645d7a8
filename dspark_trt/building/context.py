"""What the stages of a build share."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.spec import DrafterCheckpoint, DraftSource, NgramSpec, TargetCheckpoint
from dspark_trt.checkpoints.spec_json import target_spec_from_json
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.settings import EngineSettings, GpuIdentity
from dspark_trt.machine.gpu import Gpu, NoGpu, look_for_gpu

DEFAULT_MAX_SEQ_LEN = 4096


def without_model(recipe: BuildRecipe) -> NgramSpec:
    """What drafts where no model does."""
    return NgramSpec(recipe.lookup_drafts, recipe.without_model or "ngram")


class Context:
    """What the stages share: the recipe and, read only where a stage has to be made, the two checkpoints."""

    def __init__(self, recipe: BuildRecipe, output: Path) -> None:
        """`recipe` is resolved."""
        self.recipe = recipe
        self.output = output

    @property
    def precision(self) -> Precision:
        assert self.recipe.precision is not None, "resolved"
        return self.recipe.precision

    @property
    def is_on_device(self) -> bool:
        """Whether the engines run on a GPU."""
        return self.recipe.backend != "onnxruntime"

    @cached_property
    def gpu(self) -> Gpu | NoGpu:
        return look_for_gpu()

    @cached_property
    def engine_settings(self) -> EngineSettings:
        """What engines are compiled for.
        With given compute capabilities it does not depend on the machine that compiles."""
        recipe = self.recipe
        match recipe.backend:
            case "tensorrt" | "tensorrt_rtx":
                from dspark_trt.engines.tensorrt.library import check_library

                version = check_library(recipe.backend)
                if recipe.backend == "tensorrt_rtx":
                    sms = recipe.compute_capabilities
                    return EngineSettings(backend=recipe.backend, library_version=version, sms=sms)
                assert isinstance(self.gpu, Gpu), "resolved"
                gpu = GpuIdentity(name=self.gpu.name, sm=self.gpu.sm)
                return EngineSettings(backend=recipe.backend, library_version=version, sms=(gpu.sm,), gpu=gpu)
            case _:
                return EngineSettings(backend="onnxruntime", num_threads=recipe.num_threads)

    @cached_property
    def target(self) -> TargetCheckpoint:
        return read_target(self.recipe.target, self.recipe.target_revision)

    @cached_property
    def drafter(self) -> DrafterCheckpoint | None:
        """None: drafts are copied from each request's own text."""
        if not self.recipe.has_drafter_model:
            return None
        recipe = self.recipe
        drafter = read_drafter(recipe.drafter, self.target, recipe.drafter_revision, num_drafts=recipe.num_drafts)
        check_pairing(self.target, drafter)
        return drafter

    @property
    def draft_source(self) -> DraftSource:
        """Of the checkpoint, or what drafts without one."""
        return without_model(self.recipe) if self.drafter is None else self.drafter.spec

    @cached_property
    def limits(self) -> EngineLimits:
        """Read after the stage `checkpoints`, whose target.json tells the target's own limit."""
        recipe = self.recipe
        spec = target_spec_from_json(json.loads((self.output / "checkpoints" / "target.json").read_text()))
        max_seq_len = recipe.max_seq_len or min(DEFAULT_MAX_SEQ_LEN, spec.decoder.max_position_embeddings)
        return EngineLimits(recipe.max_requests, max_seq_len, recipe.max_batch_tokens)
