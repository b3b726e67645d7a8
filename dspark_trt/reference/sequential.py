"""The two operations of the plugins on PyTorch tensors: on a GPU their compiled kernels, on a CPU their definition.

Shape letters: `R` requests, `G` gamma, `V` vocabulary, `D` hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from dspark_trt_plugins.acceptance.launches import AcceptanceOperation
from dspark_trt_plugins.bundle import KernelBundle, kernel_sm
from dspark_trt_plugins.markov_head.launches import MarkovHeadOperation
from dspark_trt_plugins.prefix_select.launches import PrefixSelectOperation
from dspark_trt_plugins.prefix_select.reference import prefix_select

from dspark_trt.checkpoints.spec import BlockDrafterSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, FloatType
from dspark_trt.contract.forms import markov_head_form, select_form
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.session import Tensors
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError
from dspark_trt.reference.heads import ReferenceHeads
from dspark_trt.reference.weights import ReferenceWeights

_Compilable = AcceptanceOperation | MarkovHeadOperation | PrefixSelectOperation

ELEMENT_TYPES: dict[torch.dtype, FloatType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class SequentialStage:
    """Draws the G drafts of every request, one after the other. Source: paper section 3.1, eq. 4-7."""

    def __init__(self, spec: BlockDrafterSpec, weights: ReferenceWeights) -> None:
        """On a GPU raises EnvironmentMissingError without triton or cuda-bindings, EngineBuildError where they fail."""
        form = markov_head_form(spec, ELEMENT_TYPES[weights.element_type])
        self._output_names = form.output_names
        self._on_cpu, self._on_gpu = None, None
        if torch.device(weights.device).type == "cuda":
            self._on_gpu = gpu_operation(MarkovHeadOperation(form), weights.device)
            self._weights = {name: weights[name] for name in form.weight_names}
        else:
            self._on_cpu = ReferenceHeads(spec, _WidenedWeights(weights))

    def draft(self, base_logits: torch.Tensor, hidden: torch.Tensor, tensors: Tensors) -> None:
        """base_logits [R, G, V] and hidden [R, G, D] -> the outputs of the draft graph among `tensors`."""
        names = (bindings.ANCHOR_IDS, bindings.TEMPERATURES, bindings.UNIFORMS)
        outputs = {name: tensors[name] for name in self._output_names}
        if self._on_gpu is not None:
            inputs = {"base_logits": base_logits, "hidden": hidden, **{name: tensors[name] for name in names}}
            self._on_gpu(inputs | self._weights, outputs)
        elif self._on_cpu is not None:
            drawn = self._on_cpu.draft(base_logits.float(), hidden.float(), *(tensors[name] for name in names))
            for output, value in zip(outputs.values(), drawn, strict=False):  # confidences are last, and may be absent
                output.copy_(value)
        if bindings.CONFIDENCE_LOGITS not in outputs:  # without a head: the margin, as the draft graph gives it
            largest = tensors[bindings.DRAFT_LOGITS].topk(2, dim=-1).values
            tensors[bindings.CONFIDENCE_LOGITS].copy_(largest[..., 0] - largest[..., 1])


class TorchSelectSession:
    """prefix_select.onnx: the DeviceSession of the one PrefixSelect node."""

    def __init__(self, dims: DrafterDims, device: str) -> None:
        """On a GPU raises EnvironmentMissingError without triton or cuda-bindings, EngineBuildError where they fail."""
        self._form = select_form(dims)
        operation = PrefixSelectOperation(self._form)
        self._names = {
            "inputs": [tensor.name for tensor in operation.inputs],
            "outputs": [tensor.name for tensor in operation.outputs],
        }
        self._on_gpu = gpu_operation(operation, device) if torch.device(device).type == "cuda" else None

    def run(self, tensors: Tensors) -> None:
        """Raises EngineBuildError when a tensor does not fit or CUDA fails."""
        inputs, outputs = ({name: tensors[name] for name in names} for names in self._names.values())
        with torch_errors(bindings.SELECT_GRAPH):
            if self._on_gpu is not None:
                self._on_gpu(inputs, outputs)
                return
            chosen = prefix_select(self._form, {name: tensor.numpy() for name, tensor in inputs.items()})
            for name, output in outputs.items():
                output.copy_(torch.from_numpy(chosen[name]))

    def bind(self, tensors: Tensors) -> Callable[[], None]:
        return lambda: self.run(tensors)


class _WidenedWeights(ReferenceWeights):
    """Other weights, rounded to their element type, as float32: the kernels and the graphs sum them so."""

    def __init__(self, weights: ReferenceWeights) -> None:
        super().__init__(weights.store, weights.device)
        self._rounded = weights

    def typed(self, name: str, element_type: torch.dtype) -> torch.Tensor:
        return self._rounded[name].to(element_type)


def gpu_operation(operation: _Compilable, device: str) -> Any:
    """The operation's kernels, compiled for this GPU and loaded: a TorchOperation.

    Raises EnvironmentMissingError without triton or cuda-bindings, EngineBuildError when kernels cannot be compiled or
    loaded.
    """
    try:
        from dspark_trt_plugins.launch import TorchOperation
    except ImportError as error:
        raise _missing(error) from None
    with torch.cuda.device(device), torch_errors(operation.name):
        return TorchOperation(operation, gpu_kernels(operation, device))


def gpu_kernels(operation: _Compilable, device: str) -> KernelBundle:
    """The operation's kernels, compiled for this GPU. Raises what `gpu_operation` raises."""
    bundle: KernelBundle = _compiled(operation, torch.cuda.get_device_capability(device))
    return bundle


@functools.cache
def _compiled(operation: _Compilable, capability: tuple[int, int]) -> Any:
    try:
        from dspark_trt_plugins.bundle import SUPPORTED_SMS
        from dspark_trt_plugins.compile import compile_operation
    except ImportError as error:
        raise _missing(error) from None
    major, minor = capability
    sm = kernel_sm(10 * major + minor)
    if sm is None:
        raise EngineBuildError(
            f"{operation.name}: expected a GPU of SM {', '.join(map(str, SUPPORTED_SMS))}, found SM {major}{minor}, "
            "for which the kernels are not compiled; use another GPU, or --backend onnxruntime on the CPU"
        )
    return compile_operation(operation, [sm])


def _missing(error: ImportError) -> EnvironmentMissingError:
    return EnvironmentMissingError(
        f"the reference engines on a GPU draft with compiled kernels, which need triton and cuda-bindings ({error}); "
        "install them: pip install triton cuda-bindings"
    )
