"""AcceptEngine on one device: all rows of a step in one call of the operation Acceptance.

One copy brings the step's parameters and random words to the device, one brings its outcomes back, and the host waits
once, for that one. Shape letters: as in `contract/acceptance.py`; `L` logit rows, `V` vocabulary, `W` draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from dspark_trt_plugins.acceptance.launches import AcceptanceOperation
from dspark_trt_plugins.acceptance.reference import acceptance
from dspark_trt_plugins.operation import Extents, extents_of, workspace_offsets
from numpy.typing import NDArray

from dspark_trt.contract.acceptance import AcceptBatch, AcceptOutcomes
from dspark_trt.engines.device.buffers import FetchedBlock, Layout, StagedInputs
from dspark_trt.engines.device.errors import torch_errors

# Launches the operation on addresses: of inputs, outputs and workspace by tensor name
Launch = Callable[[Extents, Mapping[str, int]], None]
SMALLEST_INPUT_BYTES = 1 << 16


class DeviceAcceptance:
    """Memory for inputs and outcomes, and the operation between them.

    Where there are no kernels (a CPU device) the operation's NumPy reference computes on the same memory.
    """

    def __init__(
        self,
        operation: AcceptanceOperation,
        device: torch.device,
        *,
        max_requests: int,
        launch: Launch | None = None,
        draft_columns: NDArray[np.int64] | None = None,
    ) -> None:
        """launch: the compiled kernels; None on a CPU device. draft_columns [V]: where the drafter has a vocabulary of
        its own, the column of a target id or -1.

        Raises EngineBuildError where the device has no room.
        """
        assert (draft_columns is not None) == bool(operation.form.draft_vocab_size), "columns are of a draft vocabulary"
        self._operation = operation
        self._device = device
        self._launch = launch
        form = operation.form
        num_rows = max_requests * form.num_slots
        most = dict.fromkeys("ASTXUP", num_rows) | {"E": 0}
        with torch_errors("buffers of acceptance"):
            self._inputs = StagedInputs(max(Layout(operation.host_inputs, most).end, SMALLEST_INPUT_BYTES), device)
            self._fetched = FetchedBlock(Layout(operation.outputs, most).end, device)
            self._workspace = torch.empty(self._workspace_bytes(most), dtype=torch.uint8, device=device)
            self._no_drafts = torch.zeros((1, form.num_draft_columns), device=device)
            self._columns = None if draft_columns is None else torch.from_numpy(draft_columns).to(device)

    def accept(
        self, batch: AcceptBatch, logits: torch.Tensor, draft_logits: torch.Tensor | None
    ) -> Callable[[], AcceptOutcomes]:
        """Raises EngineBuildError when the device fails. Nothing is waited for here."""
        operation = self._operation
        assert batch.slots.max(initial=0) < operation.form.num_slots, "a block is longer than its kernels are made for"
        arrays = {tensor.name: getattr(batch, tensor.name) for tensor in operation.host_inputs}
        with torch_errors("acceptance"):
            drafts = self._no_drafts
            if draft_logits is not None and len(batch.drawn_rows):
                drafts, num_slots, rows_apart = _rows_of(draft_logits)
                rows = batch.draft_rows
                arrays["draft_rows"] = rows // num_slots * rows_apart + rows % num_slots
            device_arrays = {"logits": logits, "draft_logits": drafts}
            if self._columns is not None:
                device_arrays["draft_columns"] = self._columns
            shapes = {name: array.shape for name, array in (arrays | device_arrays).items()}
            extents = extents_of(operation.inputs, [shapes[tensor.name] for tensor in operation.inputs])
            layout, outputs = Layout(operation.host_inputs, extents), Layout(operation.outputs, extents)
            assert outputs.end <= len(self._fetched.memory), "more rows than requests can have"
            if layout.end > len(self._inputs.memory):  # edits of long texts
                self._inputs = StagedInputs(2 * layout.end, self._device)
            self._inputs.send((layout, arrays))
            self._run(extents, device_arrays, layout, outputs)
            fetched = self._fetched.fetch(outputs)

        def wait() -> AcceptOutcomes:
            with torch_errors("verification and acceptance"):
                found = fetched()
            return AcceptOutcomes(found["outcomes"], found["log_probs"], found["top_ids"], found["top_log_probs"])

        return wait

    def _run(
        self, extents: Extents, device_arrays: Mapping[str, torch.Tensor], layout: Layout, outputs: Layout
    ) -> None:
        if self._launch is None:
            tensors = {**device_arrays, **layout.tensors(self._inputs.memory)}
            found = acceptance(self._operation.form, {name: tensor.numpy() for name, tensor in tensors.items()})
            for name, tensor in outputs.tensors(self._fetched.memory).items():
                tensor.numpy()[...] = found[name]
            return
        if (num_bytes := self._workspace_bytes(extents)) > len(self._workspace):
            self._workspace = torch.empty(2 * num_bytes, dtype=torch.uint8, device=self._device)
        offsets, _ = workspace_offsets(self._operation.workspace, extents)
        workspace = self._workspace.data_ptr()
        pointers = {name: tensor.data_ptr() for name, tensor in device_arrays.items()}
        pointers |= layout.addresses(self._inputs.memory) | outputs.addresses(self._fetched.memory)
        pointers |= {name: workspace + offset for name, offset in offsets.items()}
        self._launch(extents, pointers)

    def _workspace_bytes(self, extents: Extents) -> int:
        return workspace_offsets(self._operation.workspace, extents)[1]


def _rows_of(draft_logits: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Draft logits [R, n, W] as rows [D, W] of the same memory, n, and how many rows one request is from the next."""
    num_requests, num_slots, num_columns = draft_logits.shape
    rows_apart = draft_logits.stride(0) // num_columns if num_requests > 1 else num_slots
    num_rows = (num_requests - 1) * rows_apart + num_slots
    return draft_logits.as_strided((num_rows, num_columns), (num_columns, 1)), num_slots, rows_apart


def compiled_launch(operation: AcceptanceOperation, bundle: Any, device: torch.device) -> Launch:
    """The kernels of a bundle, loaded on a CUDA device, launched on torch's current stream.

    Raises EngineBuildError when they are of another form or for another GPU.
    """
    from dspark_trt_plugins.launch import LoadedKernels

    with torch_errors("kernels of acceptance"), torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes torch's context the current one
        kernels = LoadedKernels(operation, bundle)

    def launch(extents: Extents, pointers: Mapping[str, int]) -> None:
        with torch.cuda.device(device):
            kernels.enqueue(extents, pointers, torch.cuda.current_stream(device).cuda_stream)

    return launch
