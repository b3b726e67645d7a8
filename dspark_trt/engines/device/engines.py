"""The device runtime: target, drafter and step engine on torch tensors of one device, over sessions of the four graphs.

Everything is enqueued on torch's current stream; whoever calls the engines stays in one thread (libraries keep handles
by thread, and one made inside of a capture would spoil it) and on one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from dspark_trt_plugins.bundle import KernelBundle

from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.contract.forms import acceptance_operation
from dspark_trt.contract.protocol import PageLimits
from dspark_trt.engines.device.acceptance import DeviceAcceptance, compiled_launch
from dspark_trt.engines.device.blocks import DeviceDrafter
from dspark_trt.engines.device.buffers import with_index
from dspark_trt.engines.device.drafter import DeviceDraftEngine
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.graphs import Capture, CudaGraphCapture
from dspark_trt.engines.device.language_model import DeviceLanguageModelEngine
from dspark_trt.engines.device.paged_drafter import PagedDraftEngine
from dspark_trt.engines.device.pages import page_limits
from dspark_trt.engines.device.session import DeviceSession
from dspark_trt.engines.device.step import DeviceStepEngine
from dspark_trt.engines.device.target import DeviceTargetEngine


@dataclass(frozen=True, slots=True)
class DeviceSessions:
    """One session for each graph of `bindings`, the target's of `paged` attention."""

    target: DeviceSession
    ingest: DeviceSession | None  # None: a language model, whose one graph `draft` is
    draft: DeviceSession
    select: DeviceSession


@dataclass(frozen=True, slots=True)
class DeviceEngines:
    """Engines that share one device."""

    target: DeviceTargetEngine
    drafter: DeviceDrafter
    step: DeviceStepEngine
    acceptance: DeviceAcceptance | None  # None: without kernels for these sizes, where the runtime goes slot by slot
    pages: PageLimits
    synchronize: Callable[[], None]  # waits for everything that was enqueued; for time measurement


def open_device_engines(
    sessions: DeviceSessions,
    target_dims: TargetDims,
    drafter_dims: DrafterDims,
    device: str | torch.device,
    *,
    num_pages: int | None = None,
    use_cuda_graphs: bool = True,
    acceptance_kernels: KernelBundle | None = None,
) -> DeviceEngines:
    """Allocate pages and buffers on `device` and put the engines together. num_pages: of the KV pool; None: every row
    can be full at once. acceptance_kernels: of `acceptance_operation` for this GPU; a CPU needs none.

    On a CUDA device calls of bucket sizes become CUDA graphs, unless `use_cuda_graphs` is false.
    Raises EngineBuildError where the device has no room.
    """
    device = with_index(torch.device(device))
    with torch_errors("opening the device"):
        capture = CudaGraphCapture(device) if device.type == "cuda" and use_cuda_graphs else None
    pages, gamma = page_limits(target_dims, drafter_dims, num_pages), drafter_dims.gamma
    target = DeviceTargetEngine(sessions.target, target_dims, pages, device, gamma=gamma, capture=capture)
    drafter = _open_drafter(sessions, drafter_dims, pages, device, capture)
    step = DeviceStepEngine(target, drafter, sessions.select, capture=capture)
    acceptance = _open_acceptance(target_dims, drafter_dims, device, acceptance_kernels)

    def synchronize() -> None:
        if device.type == "cuda":
            with torch_errors("waiting for the device"):
                torch.cuda.current_stream(device).synchronize()

    return DeviceEngines(target, drafter, step, acceptance, pages, synchronize)


def _open_drafter(
    sessions: DeviceSessions, dims: DrafterDims, pages: PageLimits, device: torch.device, capture: Capture | None
) -> DeviceDrafter:
    """Of blocks, whose context stands in pages; of a language model, or of another family, in rows of its own."""
    if sessions.ingest is None:
        return DeviceLanguageModelEngine(sessions.draft, dims, device, capture=capture)
    if dims.cache.page_positions:
        return PagedDraftEngine(sessions.ingest, sessions.draft, dims, pages, device, capture=capture)
    return DeviceDraftEngine(sessions.ingest, sessions.draft, dims, device, capture=capture)


def _open_acceptance(
    target: TargetDims, drafter: DrafterDims, device: torch.device, kernels: KernelBundle | None
) -> DeviceAcceptance | None:
    operation = acceptance_operation(target, drafter)
    if operation is None or (device.type != "cpu" and kernels is None):
        return None
    launch = None if kernels is None else compiled_launch(operation, kernels, device)
    return DeviceAcceptance(operation, device, max_requests=target.limits.max_requests, launch=launch)
