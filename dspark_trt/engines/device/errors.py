"""What PyTorch raises, as errors of the project."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dspark_trt.errors import EngineBuildError


@contextmanager
def torch_errors(what: str) -> Iterator[None]:
    """Raises EngineBuildError for what PyTorch, CUDA or the kernels' launcher raise, out of memory among it."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        raise EngineBuildError(
            f"{what}: PyTorch {torch.__version__} failed: {error}; the requests of this call are lost, open the "
            "engines again if it fails again"
        ) from error
