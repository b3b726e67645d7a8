"""Opens what `compile_graphs` made: one engine for each graph, and the device runtime over them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import drafter_dims_from_metadata, target_dims_from_metadata
from dspark_trt.contract.page_plan import DEFAULT_UTILIZATION, plan_pages
from dspark_trt.engines.settings import ENGINE_FOLDER, EngineSettings
from dspark_trt.engines.tensorrt.compiler.acceptance import read_acceptance
from dspark_trt.engines.tensorrt.compiler.facts import engine_path, read_facts
from dspark_trt.engines.tensorrt.compiler.memory import DEVICE_RESERVE_BYTES, output_bytes
from dspark_trt.engines.tensorrt.compiler.profiles import GRAPHS, MODEL_GRAPHS
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError
from dspark_trt.log import get_logger
from dspark_trt.machine.packages import device_runtime_lacks

if TYPE_CHECKING:
    from dspark_trt.engines.device.engines import DeviceEngines

logger = get_logger(__name__)

DEVICE = "cuda"  # one process per GPU; CUDA_VISIBLE_DEVICES chooses another


def open_tensorrt_engines(
    build: Path,
    settings: EngineSettings,
    *,
    use_cuda_graphs: bool = True,
    gpu_memory_utilization: float = DEFAULT_UTILIZATION,
) -> DeviceEngines:
    """Target and drafter of the build directory `build`, on the GPU of this process, likely steps made once.

    Of the GPU's memory, what `gpu_memory_utilization` leaves beside weights and whatever else is there now becomes KV
    pages.
    Raises CapacityError where a single request would not fit; EnvironmentMissingError without torch for CUDA, a GPU, or
    the package; EngineBuildError when an engine cannot be opened, or was compiled with another package than the
    settings say.
    """
    if lacks := list(device_runtime_lacks()):
        raise EnvironmentMissingError(f"{build}: the device runtime needs torch for CUDA: {'; '.join(lacks)}")
    assert settings.backend != "onnxruntime", "the registry opens those"
    import torch

    from dspark_trt.engines.device.engines import DeviceSessions, open_device_engines
    from dspark_trt.engines.device.warm_up import warm_up
    from dspark_trt.engines.tensorrt.runtime import TensorRTRuntime
    from dspark_trt.engines.tensorrt.session import TensorRTSession

    if not torch.cuda.is_available():
        raise EnvironmentMissingError(
            f"{build}: PyTorch {torch.__version__} sees no CUDA GPU; use a machine with an NVIDIA GPU and its driver "
            "(in a container: --gpus all)"
        )
    folder = build / ENGINE_FOLDER
    is_model = engine_path(folder, bindings.MODEL_GRAPH).exists()
    drafting = bindings.MODEL_GRAPH if is_model else bindings.DRAFT_GRAPH
    facts = {graph: read_facts(folder, graph) for graph in (bindings.TARGET_GRAPH, drafting)}
    for graph, found in facts.items():
        if found.library != settings.backend:
            raise EngineBuildError(
                f"{engine_path(folder, graph)}: expected an engine of {settings.backend}, found one of "
                f"{found.library}; run `dspark-trt build` again"
            )
    runtime = TensorRTRuntime(settings.backend, DEVICE)
    opened = {
        graph: TensorRTSession(engine_path(folder, graph), runtime) for graph in (MODEL_GRAPHS if is_model else GRAPHS)
    }
    sessions = DeviceSessions(
        opened[bindings.TARGET_GRAPH],
        opened.get(bindings.INGEST_GRAPH),
        opened[drafting],
        opened[bindings.SELECT_GRAPH],
    )
    target = target_dims_from_metadata(facts[bindings.TARGET_GRAPH].metadata, bindings.TARGET_GRAPH)
    drafter = drafter_dims_from_metadata(facts[drafting].metadata, drafting)
    free, total = torch.cuda.mem_get_info()
    reserved = output_bytes(target, drafter) + runtime.scratch_bytes + DEVICE_RESERVE_BYTES
    plan = plan_pages(
        target, drafter, device_bytes=total, utilization=gpu_memory_utilization, other_bytes=total - free + reserved
    )
    logger.info("KV memory: %s", plan.words)
    engines = open_device_engines(
        sessions,
        target,
        drafter,
        DEVICE,
        num_pages=plan.num_pages,
        use_cuda_graphs=use_cuda_graphs,
        acceptance_kernels=read_acceptance(folder),
    )
    warm_up(engines)
    runtime.keep_caches()
    return engines
