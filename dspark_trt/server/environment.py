"""Which variables of the environment a process that we start is given.

A list, and not all but some: whoever gets into a server finds no token of a hub or key of a cloud there.
"""

from __future__ import annotations

import os

_EVERYWHERE = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "HOME", "TMPDIR", "LANG", "TZ")
_PREFIXES_EVERYWHERE = ("LC_",)
_OF_ENGINES = ("LD_PRELOAD", "VIRTUAL_ENV", "XDG_CACHE_HOME")  # a memory allocator; packages; kernels compiled before
_PREFIXES_OF_ENGINES = (  # settings of the libraries that compute
    "CUDA_",
    "GOMP_",
    "KMP_",
    "MALLOC_",
    "MKL_",
    "NVIDIA_",
    "OMP_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCH_",
    "TRITON_",
)


def front_end_environment() -> dict[str, str]:
    """What the front end needs."""
    return _chosen(_EVERYWHERE, _PREFIXES_EVERYWHERE)


def engine_environment() -> dict[str, str]:
    """What tritonserver and the engines in it need."""
    return _chosen(_EVERYWHERE + _OF_ENGINES, _PREFIXES_EVERYWHERE + _PREFIXES_OF_ENGINES)


def _chosen(names: tuple[str, ...], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in names or name.startswith(prefixes)}
