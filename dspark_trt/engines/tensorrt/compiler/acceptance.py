"""The kernels that accept drafts: no part of a graph, so they stand in a file of their own beside the engines."""

from __future__ import annotations

from pathlib import Path

from dspark_trt_plugins.bundle import KernelBundle, read_bundle

from dspark_trt.contract.forms import acceptance_operation
from dspark_trt.engines.tensorrt.compiler.build import CompileSettings
from dspark_trt.engines.tensorrt.compiler.graphs import compile_operations, open_graphs
from dspark_trt.engines.tensorrt.compiler.targets import compile_targets
from dspark_trt.errors import EngineBuildError
from dspark_trt.log import get_logger

logger = get_logger(__name__)

KERNELS_FILE = "acceptance.kernels"


def compile_acceptance(graphs: Path, folder: Path, settings: CompileSettings) -> None:
    """Compile for the sizes of the graphs in `graphs` and the GPUs that their engines are for; `folder` gets the file.

    Raises EnvironmentMissingError when triton is missing, EngineBuildError when it cannot compile them.
    """
    opened = open_graphs(graphs)
    operation = acceptance_operation(opened.target, opened.drafter)
    if operation is None:
        logger.warning("drafts are accepted slot by slot: the kernels that do it at once are not made for these sizes")
        return
    targets = compile_targets(settings.library, settings.sms, use_plugins=settings.use_plugins)
    (bundle,) = compile_operations([operation], targets.kernel_sms)
    bundle.write(folder / KERNELS_FILE)


def read_acceptance(folder: Path) -> KernelBundle | None:
    """None where the build has none. Raises EngineBuildError when the file is not readable."""
    path = folder / KERNELS_FILE
    if not path.exists():
        return None
    try:
        return read_bundle(path)
    except (OSError, ValueError) as error:
        raise EngineBuildError(f"{error}; run `dspark-trt build` again") from None
