"""What a build will make and need, known from both configurations before a weight is fetched or a file written."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_trt.building.backends import choose_backend
from dspark_trt.building.context import DEFAULT_MAX_SEQ_LEN, without_model
from dspark_trt.building.limits import check_calibration, check_family, check_recipe, check_scheduler
from dspark_trt.building.manifest import STAGE_NAMES
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.checkpoints.drafter import read_drafter_spec
from dspark_trt.checkpoints.layout import drafter_shapes, target_shapes
from dspark_trt.checkpoints.locate import locate_here
from dspark_trt.checkpoints.pairing import check_specs
from dspark_trt.checkpoints.spec import (
    FAMILY_NAMES,
    SOURCES_OF_COPIES,
    DecoderSpec,
    DraftSource,
    Eagle3Spec,
    LanguageModelSpec,
    NgramSpec,
    TargetSpec,
)
from dspark_trt.checkpoints.target import read_target_spec
from dspark_trt.checkpoints.vocabularies import check_vocabularies
from dspark_trt.contract.dims import device_attention, drafter_dims, target_dims
from dspark_trt.contract.page_plan import OTHER_DEVICE_BYTES, PagePlan, page_bytes, plan_pages, row_bytes, table_width
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import CapacityError
from dspark_trt.graphs.heads import check_top_n
from dspark_trt.graphs.limits import check_limits
from dspark_trt.machine import cpu
from dspark_trt.machine.gpu import Gpu, look_for_gpu

# bytes of a weight, the scales of a quantised block included
WEIGHT_BYTES: dict[Precision, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.125, "int4": 0.625}
# For the guess of the time only, all of them round numbers of one CPU host and of one compilation by TensorRT-RTX
_COPY_BYTES_PER_S = 150e6  # read, hash, convert, write and hash again
_READ_BYTES_PER_S = 8e9  # weights in a step
_TIMED_STEPS = 600
_CHOICE_BYTES = 5  # of a target's weight, on the disk while an int8 form is chosen: float32, and all of it in bytes
_COMPILE_S_PER_BYTE = 36 / 419e6


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A build that can be made here, as far as that is known before it is made."""

    recipe: BuildRecipe  # resolved
    reason: str  # why this backend
    target: TargetSpec
    drafter: DraftSource
    output: Path
    max_seq_len: int
    weight_bytes: int  # of both models, as the engines hold them
    kv_bytes: (
        int  # of both: on a CPU of all rows at full length; on a GPU of all pages, or of one row where it is not here
    )
    pages: PagePlan | None  # on a GPU that is here
    disk_bytes: int  # of the finished build, at most
    seconds: float  # a guess

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def facts(self) -> dict[str, str]:
        """The plan in words."""
        recipe, drafter = self.recipe, self.drafter
        return {
            "target": f"{recipe.target}: {self.target.family}, {_decoder(self.target.decoder)}",
            "drafter": f"{recipe.drafter}: {_drafting(drafter)}",
            "backend": f"{recipe.backend}, {recipe.precision}: {self.reason}",
            "limits": (
                f"{recipe.max_requests} requests, {self.max_seq_len} positions, {recipe.max_batch_tokens} tokens a step"
            ),
            "scheduler": recipe.scheduler,
            "memory": f"{_gb(self.memory_bytes)}: {_gb(self.weight_bytes)} weights, {self._kv}",
            "disk": f"{_gb(self.disk_bytes)} at most, in {self.output}",
            "time": f"about {math.ceil(self.seconds / 60)} min (a guess)",
        }

    @property
    def _kv(self) -> str:
        if self.recipe.backend == "onnxruntime":
            return f"{_gb(self.kv_bytes)} KV of all rows"
        if self.pages is None:
            return f"{_gb(self.kv_bytes)} KV of each request of {self.max_seq_len} positions, shared pages"
        return f"KV {self.pages.words} (--gpu-memory-utilization {self.recipe.gpu_memory_utilization:g})"

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "backend": self.recipe.backend,
            "precision": self.recipe.precision,
            "reason": self.reason,
            "max_seq_len": self.max_seq_len,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "num_pages": None if self.pages is None else self.pages.num_pages,
            "disk_bytes": self.disk_bytes,
            "seconds": round(self.seconds),
        }


def make_plan(recipe: BuildRecipe, output: Path) -> BuildPlan:
    """Check all that can be checked before the work begins.

    Raises RecipeError, CheckpointError, PairingError, ExportError, EnvironmentMissingError as the build would;
    CapacityError where memory or disk do not hold it.
    """
    check_recipe(recipe)
    choice = choose_backend(recipe)
    recipe = choice.recipe
    drafter: DraftSource = without_model(recipe)
    locate_here(recipe.target, recipe.target_revision)
    if recipe.has_drafter_model:
        # a path that does not exist is said before the hub is asked for the other one
        locate_here(recipe.drafter, recipe.drafter_revision)
    target = read_target_spec(recipe.target, recipe.target_revision)
    if recipe.has_drafter_model:
        drafter = read_drafter_spec(recipe.drafter, target, recipe.drafter_revision, num_drafts=recipe.num_drafts)
    max_seq_len = recipe.max_seq_len or min(DEFAULT_MAX_SEQ_LEN, target.decoder.max_position_embeddings)
    limits = EngineLimits(recipe.max_requests, max_seq_len, recipe.max_batch_tokens)
    check_limits(limits, target.decoder, gamma=drafter.gamma, what="target")
    if not isinstance(drafter, NgramSpec):
        check_specs(target, drafter)
        if isinstance(drafter, LanguageModelSpec):
            check_vocabularies(recipe.target, recipe.target_revision, recipe.drafter, recipe.drafter_revision, drafter)
        check_family(recipe, drafter)
        check_limits(limits, drafter.decoder, gamma=drafter.gamma, what="drafter")
        check_top_n(drafter.decoder.vocab_size, recipe.markov_top_n or 0)
    check_scheduler(recipe, drafter)
    check_calibration(recipe, drafter)
    plan = _sized(recipe, choice.reason, target, drafter, output, limits)
    _check_memory(plan)
    _check_disk(plan)
    return plan


def _sized(
    recipe: BuildRecipe, reason: str, target: TargetSpec, drafter: DraftSource, output: Path, limits: EngineLimits
) -> BuildPlan:
    assert recipe.precision is not None, "resolved"
    shapes, decoders = list(target_shapes(target).values()), [target.decoder]
    if not isinstance(drafter, NgramSpec):
        shapes += drafter_shapes(drafter).values()
        decoders.append(drafter.decoder)
    weight_bytes = int(sum(map(math.prod, shapes)) * WEIGHT_BYTES[recipe.precision])
    is_on_device = recipe.backend != "onnxruntime"
    positions = limits.max_requests * (limits.max_seq_len + limits.max_batch_tokens)
    kv_bytes, pages = sum(positions * 4 * _kv_elements(each) for each in decoders), None
    if is_on_device:
        kv_bytes, pages = _on_device(recipe, target, drafter, limits, weight_bytes)
    # engines hold the weights again, and a tied or shared head once more
    head = target.decoder.vocab_size * target.decoder.hidden_size * WEIGHT_BYTES[recipe.precision]
    disk_bytes = int((2 * weight_bytes + 2 * head) if is_on_device else weight_bytes + head)
    if recipe.precision == "int8":
        disk_bytes += sum(map(math.prod, target_shapes(target).values())) * _CHOICE_BYTES
    seconds = 10 + 3 * weight_bytes / _COPY_BYTES_PER_S + _TIMED_STEPS * weight_bytes / _READ_BYTES_PER_S
    return BuildPlan(
        recipe=recipe,
        reason=reason,
        target=target,
        drafter=drafter,
        output=output,
        max_seq_len=limits.max_seq_len,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        pages=pages,
        disk_bytes=disk_bytes,
        seconds=seconds + (disk_bytes * _COMPILE_S_PER_BYTE if is_on_device else 0),
    )


def _on_device(
    recipe: BuildRecipe, target: TargetSpec, drafter: DraftSource, limits: EngineLimits, weight_bytes: int
) -> tuple[int, PagePlan | None]:
    """KV bytes and pages where the GPU is here; else what one request of full length takes. Rows of a drafter count."""
    common: dict[str, Any] = {"limits": limits, "element_type": "float16" if recipe.precision == "fp16" else "bfloat16"}
    of_target = target_dims(target, num_taps=drafter.num_taps, attention="paged", **common)
    of_drafter = None
    if not isinstance(drafter, NgramSpec):
        of_drafter = drafter_dims(drafter, attention=device_attention(drafter), **common)
    gpu = look_for_gpu()
    if not isinstance(gpu, Gpu) or (recipe.compute_capabilities or (gpu.sm,)) != (gpu.sm,):  # for another GPU
        of_request = table_width(of_target, of_drafter) * page_bytes(of_target, of_drafter)
        return of_request + row_bytes(of_drafter) // limits.max_requests, None
    pages = plan_pages(
        of_target,
        of_drafter,
        device_bytes=gpu.memory_bytes,
        utilization=recipe.gpu_memory_utilization,
        other_bytes=weight_bytes + OTHER_DEVICE_BYTES,
    )
    return pages.kv_bytes + row_bytes(of_drafter), pages


def _kv_elements(decoder: DecoderSpec) -> int:
    """Of one position."""
    shapes = [decoder.shape_of(layer) for layer in range(decoder.num_layers)]
    return 2 * sum(shape.num_kv_heads * shape.head_dim for shape in shapes)


def _check_memory(plan: BuildPlan) -> None:
    if plan.recipe.backend != "onnxruntime":
        return  # pages are as many as fit
    available = cpu.memory_bytes()
    if plan.memory_bytes > available:
        raise CapacityError(
            f"memory: the engines need {_gb(plan.memory_bytes)} ({_gb(plan.weight_bytes)} weights, "
            f"{_gb(plan.kv_bytes)} KV of "
            f"{plan.recipe.max_requests} rows of {plan.max_seq_len} positions), found {_gb(available)}; lower "
            f"--max-requests or "
            "--max-seq-len, or choose a --precision of fewer bytes"
        )


def _check_disk(plan: BuildPlan) -> None:
    place = next(folder for folder in (plan.output.absolute(), *plan.output.absolute().parents) if folder.exists())
    there = sum(
        file.stat().st_size for name in STAGE_NAMES for file in (plan.output / name).rglob("*") if file.is_file()
    )
    available = shutil.disk_usage(place).free
    if plan.disk_bytes - there > available:
        raise CapacityError(
            f"disk: the build takes up to {_gb(plan.disk_bytes)}, found {_gb(available)} free at {place}; make room, "
            f"or give an "
            "--output on another disk"
        )


def _drafting(drafter: DraftSource) -> str:
    if isinstance(drafter, NgramSpec):
        return f"no model; up to {drafter.gamma} drafts {SOURCES_OF_COPIES[drafter.kind]}"
    family, taps = FAMILY_NAMES[drafter.kind], list(drafter.target_layer_ids)
    if isinstance(drafter, LanguageModelSpec) and drafter.mask_token_id is not None:
        family = f"PARD drafter (mask token {drafter.mask_token_id})"
    if isinstance(drafter, Eagle3Spec):
        family = "DART drafter" if drafter.is_masked else "MTP module" if drafter.is_module else family
    read = f"taps {taps}" if taps else "no taps"
    return f"{family}, gamma {drafter.gamma}, {read}, {_decoder(drafter.decoder)}"


def _decoder(decoder: DecoderSpec) -> str:
    return f"{decoder.num_layers} layers, hidden {decoder.hidden_size}, vocabulary {decoder.vocab_size}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
