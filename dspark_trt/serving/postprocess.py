"""The ensemble's last step: gives text and numbers the names, shapes and types of TensorRT-LLM's backend.

Detokenisation is done where the state of a request lives, in the runtime, so nothing here depends on earlier responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.packaging.signature import ENGINE_OUTPUTS, PACKED, PACKED_OUTPUTS
from dspark_trt.serving.fields import Tensors

_NUMPY_TYPES = {"FP32": np.float32, "INT32": np.int32}
_PACKED_TYPES = [
    (name, _NUMPY_TYPES[tensor.data_type])
    for name in PACKED_OUTPUTS
    for tensor in ENGINE_OUTPUTS
    if tensor.name == name
]


def pack(outputs: Mapping[str, float]) -> NDArray[np.float64]:
    """The numbers of a response as the one tensor that `postprocess` takes apart, [1, n]."""
    return np.array([[outputs[name] for name in PACKED_OUTPUTS]], dtype=np.float64)


def postprocess(tensors: Tensors) -> Mapping[str, NDArray[Any]]:
    """The text is one-dimensional, without a batch dimension: clients take `text_output[0]`."""
    numbers = tensors["NUMBERS"].ravel()
    return {
        "OUTPUT": tensors["TEXT"].ravel(),
        "output_log_probs": tensors["LOG_PROBS"],
        "finish_reason": tensors["FINISH_REASON"],
        **{name: np.array([[number]], dtype) for (name, dtype), number in zip(_PACKED_TYPES, numbers, strict=True)},
    }


def ping(handle: int) -> Mapping[str, NDArray[Any]]:
    """What the engine model sends to learn whether a request still has a client: nothing, under its handle negated."""
    nothing = np.array([[b""]], dtype=np.object_)
    return {
        "text": nothing,
        "handle": np.array([[-handle]], dtype=np.int64),
        PACKED.name: np.zeros((1, len(PACKED_OUTPUTS)), dtype=np.float64),
        "output_log_probs": np.empty((1, 1, 0), dtype=np.float32),
        "finish_reason": nothing,
    }


def is_ping(tensors: Tensors) -> bool:
    return int(tensors["HANDLE"].ravel()[0]) < 0


def handle_of(tensors: Tensors) -> int:
    """Which request of the engine model a response or a ping belongs to."""
    return abs(int(tensors["HANDLE"].ravel()[0]))
