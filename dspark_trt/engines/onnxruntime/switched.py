"""A target whose Linear layers are switched from call to call (graphs/switched.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract import bindings
from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeTargetEngine
from dspark_trt.engines.onnxruntime.session import DEFAULT_SETTINGS, OnnxRuntimeSettings


class SwitchedTargetEngine(OnnxRuntimeTargetEngine):
    """Set `low_steps` before a call."""

    def __init__(self, graphs: Path, num_layers: int, settings: OnnxRuntimeSettings = DEFAULT_SETTINGS) -> None:
        super().__init__(graphs, settings)
        self.low_steps: NDArray[np.float32] = np.zeros(num_layers, np.float32)

    def _further_inputs(self) -> dict[str, NDArray[np.float32]]:
        return {bindings.LOW_STEPS: self.low_steps}
