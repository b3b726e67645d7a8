"""What engines on a GPU need besides TensorRT, found without importing it: torch for CUDA and triton."""

from __future__ import annotations

import runpy
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
