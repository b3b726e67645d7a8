"""The graphs of a build as the compiler takes them: opened without their weights, and the kernels of their plugins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from dspark_trt_plugins.bundle import KernelBundle
from dspark_trt_plugins.operation import Operation
from dspark_trt_plugins.registry import check_kernels, operations_in

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import (
    PORTABLE,
    DrafterDims,
    TargetDims,
    drafter_dims_from_metadata,
    target_dims_from_metadata,
)
from dspark_trt.engines.tensorrt.compiler.profiles import GRAPHS, MODEL_GRAPHS, Profile, graph_profiles
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError
from dspark_trt.log import get_logger
from dspark_trt.machine.packages import TRITON_FIX

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedGraphs:
    """The graphs of a build, by file name."""

    folder: Path
    models: dict[str, onnx.ModelProto]
    target: TargetDims
    drafter: DrafterDims

    def profiles(self, graph: str) -> tuple[Profile, ...]:
        """That a graph is compiled with."""
        return graph_profiles(graph, self.target, self.drafter)


def open_graphs(folder: Path) -> OpenedGraphs:
    """Raises EngineBuildError when a graph is missing, not one of ours, or not made for TensorRT."""
    models = {}
    is_model = (folder / bindings.MODEL_GRAPH).is_file()
    for graph in MODEL_GRAPHS if is_model else GRAPHS:
        path = folder / graph
        if not path.is_file():
            raise EngineBuildError(f"{path} does not exist; run `dspark-trt build` again")
        models[graph] = onnx.load(path, load_external_data=False)
    metadata = {graph: metadata_of(model) for graph, model in models.items()}
    target = target_dims_from_metadata(metadata[bindings.TARGET_GRAPH], str(folder / bindings.TARGET_GRAPH))
    drafting = bindings.MODEL_GRAPH if is_model else bindings.DRAFT_GRAPH
    drafter = drafter_dims_from_metadata(metadata[drafting], str(folder / drafting))
    for graph, dims, expected in ((bindings.TARGET_GRAPH, target, {"paged"}), (drafting, drafter, PORTABLE)):
        if dims.attention not in expected or dims.element_type == "float32":
            raise EngineBuildError(
                f"{folder / graph}: expected {' or '.join(sorted(expected))} attention in bf16 or fp16, which is what "
                f"TensorRT compiles, found {dims.attention} in {dims.element_type}; export the graphs for TensorRT"
            )
    return OpenedGraphs(folder, models, target, drafter)


def metadata_of(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def compile_kernels(models: Iterable[onnx.ModelProto], sms: Sequence[int]) -> list[KernelBundle]:
    """Machine code of the plugins' kernels, for every form in the graphs; a warning where a kernel spills.

    Raises EnvironmentMissingError when Triton is missing, EngineBuildError when it cannot compile them or one takes
    more shared memory than a block may have.
    """
    bundles: list[KernelBundle] = []
    for model in models:
        try:
            operations = operations_in(model)
        except ValueError as error:
            raise EngineBuildError(f"the kernels of the plugins cannot be compiled: {error}") from error
        bundles += compile_operations(operations, sms)
        check_kernels(model, bundles)
    return bundles


def compile_operations(operations: Iterable[Operation], sms: Sequence[int]) -> list[KernelBundle]:
    """Raises what `compile_kernels` raises."""
    try:
        from dspark_trt_plugins.compile import check_resources, compile_operation
    except ImportError as error:
        raise EnvironmentMissingError(
            f"the kernels of the plugins are compiled by the package triton, which cannot be imported ({error}); "
            f"install it: {TRITON_FIX}"
        ) from None
    try:
        bundles = [compile_operation(operation, sms) for operation in operations]
        for bundle in bundles:
            for spill in check_resources(bundle):
                logger.warning("%s %s: %s, and is slower for it", bundle.operation, dict(bundle.attributes), spill)
    except (ValueError, RuntimeError) as error:
        raise EngineBuildError(f"the kernels of the plugins cannot be compiled: {error}") from error
    return bundles
