"""The ensemble's last step: gives the text the shape that clients of TensorRT-LLM's backend read.

Detokenisation is done where the state of a request lives, in `runtime/emission`, so nothing here depends on earlier
responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from dspark_trt.serving.fields import Tensors


def postprocess(tensors: Tensors) -> Mapping[str, NDArray[Any]]:
    """One-dimensional, without a batch dimension: clients take `text_output[0]`."""
    return {"OUTPUT": tensors["TEXT"].ravel()}


def handle_of(tensors: Tensors) -> int:
    """Which request of the engine model a response belongs to."""
    return int(tensors["HANDLE"].ravel()[0])
