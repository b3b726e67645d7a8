"""The device runtime without a compiler: PyTorch sessions straight from the checkpoints, on a GPU or on the CPU.

It is what a GPU host with only torch and triton runs, and what the tests compare TensorRT with. Its attention costs as
much as the capacity of a row; it is the oracle, not a backend to serve with
(docs/adr/0008).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dspark_trt.checkpoints.drafters.block import block_spec
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.contract.dims import DrafterDims, FloatType, TargetDims, drafter_dims, target_dims
from dspark_trt.contract.forms import acceptance_operation
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.device.engines import DeviceEngines, DeviceSessions, open_device_engines
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.reference.draft_session import TorchDraftSession
from dspark_trt.reference.sequential import TorchSelectSession, gpu_kernels
from dspark_trt.reference.sessions import TorchIngestSession, TorchTargetSession, context_type
from dspark_trt.reference.weights import ReferenceWeights

DevicePrecision = Literal["fp32", "bf16", "fp16"]
ELEMENT_TYPES: dict[DevicePrecision, FloatType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def open_device_reference_engines(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    *,
    limits: EngineLimits,
    precision: DevicePrecision,
    device: str,
    use_cuda_graphs: bool = True,
) -> DeviceEngines:
    """Target and drafter in one element type on one device ("cpu", "cuda", "cuda:1").

    Raises what `open_reference_sessions` raises, and EngineBuildError where the device has no room for caches and
    buffers.
    """
    opened = open_reference_sessions(target, drafter, limits=limits, precision=precision, device=device)
    accepting = acceptance_operation(opened.target_dims, opened.drafter_dims)
    has_kernels = accepting is not None and torch.device(device).type == "cuda"
    return open_device_engines(
        opened.sessions,
        opened.target_dims,
        opened.drafter_dims,
        device,
        use_cuda_graphs=use_cuda_graphs,
        acceptance_kernels=gpu_kernels(accepting, device) if accepting and has_kernels else None,
    )


@dataclass(frozen=True, slots=True)
class ReferenceSessions:
    """Sessions of all graphs, and the sizes that their tensors have."""

    sessions: DeviceSessions
    target_dims: TargetDims
    drafter_dims: DrafterDims


def open_reference_sessions(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    *,
    limits: EngineLimits,
    precision: DevicePrecision,
    device: str,
) -> ReferenceSessions:
    """Raises EnvironmentMissingError where torch sees no such device, or triton or cuda-bindings is missing on a GPU;
    EngineBuildError when the weights do not fit or kernels cannot be loaded.
    """
    check_device(device)
    element_type = ELEMENT_TYPES[precision]
    of_target = target_dims(
        target.spec,
        num_taps=drafter.spec.num_taps,
        limits=limits,
        attention="standard",
        element_type=element_type,
    )
    of_drafter = drafter_dims(drafter.spec, limits=limits, attention="standard", element_type=element_type)
    spec = block_spec(drafter, "the runtime of devices")
    with torch_errors(f"weights on {device}"):
        target_weights = ReferenceWeights(target.weights, device, getattr(torch, element_type))
        drafter_weights = ReferenceWeights(drafter.weights, device, getattr(torch, element_type))
        sessions = DeviceSessions(
            target=TorchTargetSession(
                target.spec,
                target_weights,
                of_target,
                drafter.spec.target_layer_ids,
                norm_last_tap=drafter.spec.is_last_tap_normed,
            ),
            ingest=TorchIngestSession(spec, drafter_weights, of_drafter),
            draft=TorchDraftSession(
                spec,
                drafter_weights,
                of_drafter,
                target_spec=target.spec,
                target_weights=target_weights,
                draft_ids=drafter.draft_ids,
            ),
            select=TorchSelectSession(of_drafter, device),
        )
        for weights in (target_weights, drafter_weights):
            _load(weights)
    return ReferenceSessions(sessions, of_target, of_drafter)


def _load(weights: ReferenceWeights) -> None:
    """Read everything that calls use now, and not in the first call.
    Sessions hold embeddings and output heads already."""
    for name in weights.store.names():
        if name == "fc.weight":
            weights.typed(name, context_type(weights.element_type))
        elif name not in (EMBEDDING, HEAD):
            weights.typed(name, torch.float32 if name.endswith("norm.weight") else weights.element_type)


def check_device(device: str) -> None:
    """Raises EnvironmentMissingError where torch sees no such device."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentMissingError(
            f"device {device}: PyTorch {torch.__version__} sees no CUDA GPU; install an NVIDIA driver and torch for "
            "CUDA (pip install torch, as https://pytorch.org says for this machine), or use device cpu"
        )
