"""Whether a build can fit, told before it starts. Estimates: the message says so and gives the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.contract.draft_bindings import drafts
from dspark_trt.contract.page_plan import PagePlan, plan_pages
from dspark_trt.engines.tensorrt.compiler.scratch import ELEMENT_BYTES
from dspark_trt.engines.tensorrt.library import LIBRARIES, Library
from dspark_trt.errors import CapacityError, EngineBuildError
from dspark_trt.machine import cpu

# Memory of the process while tensorrt_rtx 1.7.1 compiles: 3.0 GiB for 1.2 GB of weights, 1.8 GiB for 0.27 GB
# (measured). That of `tensorrt` was not measured and is taken to be the same.
HOST_BYTES_PER_WEIGHT_BYTE = 4
HOST_RESERVE_BYTES = 3 << 28
# CUDA context, modules and the compiler's workspace on the device; a guess on the safe side
DEVICE_RESERVE_BYTES = 2 << 30


def weight_bytes(model: onnx.ModelProto) -> int:
    """Bytes of all weights of a graph, loaded without its external data."""
    return sum(
        math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in model.graph.initializer
    )


def output_bytes(target: TargetDims, drafter: DrafterDims) -> int:
    """Bytes of the largest outputs: logits, taps and draft logits."""
    sizes = {"L": target.limits.max_batch_tokens, "T": target.limits.max_batch_tokens, "R": drafter.limits.max_requests}
    outputs = [*bindings.target_outputs(target), *drafts(drafter, drafter.gamma)]
    if drafter.is_in_turn:
        outputs += drafts(drafter, 1)  # of the slot that is drafted
    # of rows, and of the requests of a call going in and out
    outputs.append(bindings.Binding("row states", drafter.row_state_type, ("R", 3 * drafter.row_state_width)))
    return sum(
        math.prod(sizes[size] if isinstance(size, str) else size for size in output.shape)
        * ELEMENT_BYTES[output.element_type]
        for output in outputs
        if not bindings.is_cache(output.name)
    )


def memory_plan(weights: Mapping[str, int], target: TargetDims, drafter: DrafterDims, scratch: int) -> dict[str, int]:
    """Bytes that the engines take of a GPU beside the KV pool, by what for."""
    return {
        "weights": sum(weights.values()),
        "outputs": output_bytes(target, drafter),
        "scratch": scratch,
        "CUDA": DEVICE_RESERVE_BYTES,
    }


def check_memory(
    library: Library,
    weights: Mapping[str, int],
    plan: Mapping[str, int],
    target: TargetDims,
    drafter: DrafterDims,
    *,
    device_bytes: int | None,
    utilization: float,
) -> PagePlan | None:
    """The KV pool that is left; None where the GPU is not here. Refuse a build that cannot fit.

    Args:
        weights: bytes of the weights of each graph.
        plan: as `memory_plan` gives it.
        device_bytes: memory of the GPU that the engines are for; None where it is not here.
        utilization: how much of it may be taken.

    Raises EngineBuildError with the estimate, what there is, and what to do.
    """
    largest = max(weights, key=lambda graph: weights[graph])
    needed = weights[largest] * HOST_BYTES_PER_WEIGHT_BYTE + HOST_RESERVE_BYTES
    found = cpu.memory_bytes()
    if needed > found:
        raise EngineBuildError(
            f"compiling {largest} with {library} is estimated to need {_gib(needed)} of host memory "
            f"({_gib(HOST_RESERVE_BYTES)} and {HOST_BYTES_PER_WEIGHT_BYTE} times its weights of "
            f"{_gib(weights[largest])}), and this machine has {_gib(found)}; build on a machine with more memory, or "
            "take a smaller target"
        )
    if device_bytes is None:
        assert LIBRARIES[library].takes_sms, "only such a package compiles for a GPU that is not here"
        return None
    try:
        return plan_pages(
            target, drafter, device_bytes=device_bytes, utilization=utilization, other_bytes=sum(plan.values())
        )
    except CapacityError as error:
        raise EngineBuildError(f"the engines are estimated not to fit this GPU ({listed(plan)}): {error}") from error


def listed(plan: Mapping[str, int]) -> str:
    """The plan in words."""
    return ", ".join(f"{name} {_gib(size)}" for name, size in plan.items())


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
