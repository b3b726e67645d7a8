"""A target whose graph tells the error of quantising each of its Linear layers (graphs/survey.py).

Shape letters: `T` packed tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract import bindings
from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeTargetEngine
from dspark_trt.engines.onnxruntime.session import DEFAULT_SETTINGS, OnnxRuntimeSettings


class OnnxRuntimeSurvey(OnnxRuntimeTargetEngine):
    """Ask for the logits of every token: a layer's error is that of each."""

    def __init__(self, graphs: Path, num_layers: int, settings: OnnxRuntimeSettings = DEFAULT_SETTINGS) -> None:
        super().__init__(graphs, settings)
        self.linear_errors: NDArray[np.float32] = np.empty((num_layers, 0), np.float32)
        """[number of layers, T] of the last call: squared error relative to the squared output, for each token."""

    def _further_outputs(self, num_tokens: int) -> dict[str, NDArray[np.float32]]:
        self.linear_errors = np.empty((len(self.linear_errors), num_tokens), np.float32)
        return {bindings.LINEAR_ERRORS: self.linear_errors}
