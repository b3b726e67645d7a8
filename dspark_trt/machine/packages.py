"""What engines on a GPU need besides TensorRT, found without importing it: torch for CUDA and triton."""

from __future__ import annotations

import runpy
import shlex
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

# whose versions a build records; TensorRT goes by several names
DEVICE_DISTRIBUTIONS = (
    *("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
    *("torch", "triton", "cuda-bindings"),
)
TORCH_FIX = "pip install torch==2.13.0, a build for CUDA"
TRITON_FIX = "pip install --no-deps triton==3.9.0"


def install_extra(extra: str) -> str:
    """The command that installs what an extra of this package stands for.

    It names the packages themselves: `dspark-trt[extra]` is on no index, and how it was installed (a clone, a wheel)
    is not known.
    """
    try:
        requirements = metadata.requires("dspark-trt") or []
    except metadata.PackageNotFoundError:  # run from its sources
        requirements = []
    wanted = [item.split(";")[0].strip() for item in requirements if item.endswith(f'extra == "{extra}"')]
    return f"pip install {' '.join(map(shlex.quote, wanted))}" if wanted else f"in a clone: pip install '.[{extra}]'"


def torch_versions() -> tuple[str, str | None] | None:
    """Versions of torch and of the CUDA that it was built for, which is None in a CPU build; None without torch.

    torch itself takes seconds to import; its version module says both.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return facts["__version__"], facts["cuda"]


def device_runtime_lacks() -> Iterator[str]:
    """What this machine lacks for running engines on a GPU, each with what to do."""
    versions = torch_versions()
    if versions is None:
        yield f"torch is not installed ({TORCH_FIX})"
    elif versions[1] is None:
        yield f"torch {versions[0]} is built without CUDA ({TORCH_FIX})"


def compiler_lacks() -> Iterator[str]:
    """What this machine lacks for compiling the plugins' kernels, each with what to do."""
    if find_spec("triton") is None:
        yield f"triton is not installed ({TRITON_FIX})"


def installed_versions(*names: str) -> dict[str, str]:
    """Versions of those of the distributions that are installed."""
    installed = {distribution.name.lower().replace("_", "-") for distribution in metadata.distributions()}
    return {name: metadata.version(name) for name in names if name in installed}
