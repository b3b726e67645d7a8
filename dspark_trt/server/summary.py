"""What a server that starts says of itself, once; and whether the machine has the memory that it will take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_trt.building.finished import read_finished
from dspark_trt.checkpoints.spec import NgramSpec
from dspark_trt.checkpoints.spec_json import read_draft_source, target_spec_from_json
from dspark_trt.contract.cache_dims import CacheDims
from dspark_trt.contract.dims import (
    FloatType,
    device_attention,
    drafter_dims,
    host_attention,
    target_dims,
)
from dspark_trt.contract.page_plan import OTHER_DEVICE_BYTES, PagePlan, page_bytes, plan_pages, table_width
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.settings import read_engine_settings
from dspark_trt.errors import CapacityError
from dspark_trt.machine.cpu import memory_bytes
from dspark_trt.machine.gpu import Gpu, look_for_gpu
from dspark_trt.packaging.model_repo import scheduler_of
from dspark_trt.server.options import ServeOptions

_ELEMENT_TYPES: dict[str, FloatType] = {"bf16": "bfloat16", "fp16": "float16"}  # others compute in float32


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the engines of a build take, known before they are opened."""

    limits: EngineLimits
    kv_bytes: int  # of both models: on a CPU every row full; on a GPU all pages, or a full row where it is not here
    weight_bytes: int  # of the files
    pages: PagePlan | None = None  # on a GPU that is here

    @property
    def kv(self) -> str:
        """KV memory in words."""
        if self.pages is not None:
            return f"KV {self.pages.words}"
        rows = f"{self.limits.max_requests} rows of {self.limits.max_seq_len} tokens"
        return f"{rows}: {_gigabytes(self.kv_bytes)} of KV memory at most"


def footprint(build_dir: Path) -> Footprint:
    """Raises ManifestError when the build is not finished; CapacityError where the GPU here holds no request."""
    build, stages = read_finished(build_dir)
    settings: dict[str, Any] = stages["graphs"].settings
    limits = EngineLimits(**settings["limits"])
    element_type = _ELEMENT_TYPES.get(settings["precision"], "float32")
    target = target_spec_from_json(json.loads((build_dir / "checkpoints" / "target.json").read_text()))
    drafter = read_draft_source(build_dir)
    on_device = bool(settings["is_on_device"])
    of_target = target_dims(
        target,
        num_taps=drafter.num_taps,
        limits=limits,
        attention="paged" if on_device else "gqa",
        element_type=element_type,
    )
    of_drafter = None
    if not isinstance(drafter, NgramSpec):
        form = device_attention(drafter) if on_device else host_attention(drafter)
        of_drafter = drafter_dims(drafter, limits=limits, attention=form, element_type=element_type)
    weights = [path for path in (build_dir / "graphs").iterdir() if path.suffix != ".json"]
    weight_bytes = sum(path.stat().st_size for path in weights)
    if not on_device:
        caches = [dims.cache for dims in (of_target, of_drafter) if dims is not None]
        return Footprint(limits, sum(_bytes(cache, element_type) for cache in caches), weight_bytes)
    gpu = look_for_gpu()
    if not isinstance(gpu, Gpu):
        return Footprint(limits, table_width(of_target, of_drafter) * page_bytes(of_target, of_drafter), weight_bytes)
    pages = plan_pages(
        of_target,
        of_drafter,
        device_bytes=gpu.memory_bytes,
        utilization=build.recipe.gpu_memory_utilization,
        other_bytes=weight_bytes + OTHER_DEVICE_BYTES,
    )
    return Footprint(limits, pages.kv_bytes, weight_bytes, pages)


def check_memory(build_dir: Path) -> None:
    """KV memory is reserved whole and taken as positions are filled: what cannot fit would end the server under load.

    On a GPU the build has checked it, and it is taken at the start. Raises CapacityError with what can be done.
    """
    if read_engine_settings(build_dir).backend != "onnxruntime":
        return
    found, here = footprint(build_dir), memory_bytes()
    if found.kv_bytes + found.weight_bytes > here:
        raise CapacityError(
            f"{build_dir}: {found.limits.max_requests} rows of {found.limits.max_seq_len} tokens take "
            f"{_gigabytes(found.kv_bytes)} of KV memory beside {_gigabytes(found.weight_bytes)} of weights, and this "
            f"machine has {_gigabytes(here)}; build with a smaller --max-requests or --max-seq-len"
        )


def summarise(build_dir: Path, options: ServeOptions, *, http_url: str, grpc_address: str, metrics_url: str) -> str:
    """A few lines for a person: model, backend, scheduler, memory, admission, endpoints."""
    rows = _rows(build_dir, options)
    endpoints = ("endpoints", f"{http_url} (HTTP), {grpc_address} (gRPC), {metrics_url}")
    return "\n".join(f"{name:<10} {text}" for name, text in (*rows, endpoints))


def _rows(build_dir: Path, options: ServeOptions) -> Iterator[tuple[str, str]]:
    summary, stages = read_finished(build_dir)
    settings, found = read_engine_settings(build_dir), footprint(build_dir)
    limits, admission = found.limits, options.admission
    yield "model", f"{summary.recipe.target} with {summary.recipe.drafter}"
    yield "backend", f"{settings.backend}, {stages['graphs'].settings['precision']}, for {settings.device}"
    yield "scheduler", options.scheduler or scheduler_of(build_dir)
    yield (
        "memory",
        f"{found.kv}, {_gigabytes(found.weight_bytes)} of weights",
    )
    yield (
        "admission",
        f"{admission.queue_size(limits.max_requests)} requests may wait, each {admission.max_queue_s:g} s; "
        f"a request has {admission.default_timeout_s:g} s",
    )


def _bytes(cache: CacheDims, element_type: FloatType) -> int:
    element_bytes = 4 if element_type == "float32" else 2
    return cache.num_elements * element_bytes


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
