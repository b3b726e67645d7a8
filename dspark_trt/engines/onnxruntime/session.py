"""One graph under ONNX Runtime: opening it, and running it on arrays that stay where they are."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dspark_trt.engines.onnxruntime.memory import huge_pages
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError
from dspark_trt.machine import cpu
from dspark_trt.machine.packages import install_extra

_MAX_CACHED_BINDINGS = 64

# Arrays whose address a binding keeps: name -> array.
BoundArrays = Mapping[str, NDArray[Any]]


def import_onnxruntime() -> Any:
    """The onnxruntime module. Raises EnvironmentMissingError with the command that installs it.

    Releases since 1.29 send names and hashes of models, and of the program that runs them, to their maker, unless this
    variable is there before they are imported.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime
    except ImportError as error:
        raise EnvironmentMissingError(
            f"the onnxruntime backend needs the package onnxruntime, which cannot be imported ({error}); "
            f"install it: {install_extra('onnxruntime')}"
        ) from None
    onnxruntime.disable_telemetry_events()  # where somebody else imported it first
    return onnxruntime


@dataclass(frozen=True, slots=True)
class OnnxRuntimeSettings:
    """What is chosen when engines are opened, not when graphs are written."""

    num_threads: int | None = None  # None: the cores this process may use


DEFAULT_SETTINGS = OnnxRuntimeSettings()


class GraphSession:
    """An opened graph. Caches are bound once for each range of rows; index arrays and outputs at every run."""

    def __init__(self, graph: Path, *, num_threads: int | None) -> None:
        """Raises EnvironmentMissingError without onnxruntime, EngineBuildError when the graph cannot be opened."""
        ort = import_onnxruntime()
        self._graph = graph
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads or cpu.num_cores()
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # what fails is raised, not printed
        # memory patterns are kept for every combination of input shapes ever seen
        options.enable_mem_pattern = False
        # target and drafter run in turn: one must not spin on the other's cores
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            with huge_pages():
                self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises classes of its own, without a common base
            raise EngineBuildError(
                f"{graph}: ONNX Runtime {ort.__version__} cannot open the graph: {error}; run `dspark-trt build` again"
            ) from None
        self._bindings: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self._session.get_modelmeta().custom_metadata_map)

    def run(
        self,
        key: tuple[int, ...],
        in_place: Callable[[], tuple[BoundArrays, BoundArrays]],
        inputs: BoundArrays,
        outputs: BoundArrays,
    ) -> None:
        """Run once.

        Args:
            key: names the ranges of rows; `in_place` is asked for the caches (inputs, outputs) once per key.
            inputs: C-contiguous arrays, alive until the call returns.
            outputs: arrays that the graph writes into.

        Raises EngineBuildError when the backend fails.
        """
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._session.io_binding()
            cache_inputs, cache_outputs = in_place()
            _bind(binding.bind_input, cache_inputs)
            _bind(binding.bind_output, cache_outputs)
            self._bindings[key] = binding
            if len(self._bindings) > _MAX_CACHED_BINDINGS:
                self._bindings.popitem(last=False)
        else:
            self._bindings.move_to_end(key)
        _bind(binding.bind_input, inputs)
        _bind(binding.bind_output, outputs)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise EngineBuildError(
                f"{self._graph}: ONNX Runtime failed: {error}; the step's requests are lost"
            ) from None


def _bind(bind: Callable[..., None], arrays: BoundArrays) -> None:
    for name, array in arrays.items():
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
