"""What every draft engine of a device has, whatever its family: staged calls, and where their drafts stand.

Shape letters: `R` requests, `G` gamma, `W` draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dspark_trt.contract import bindings
from dspark_trt.contract.bindings import Binding
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.draft_bindings import drafts
from dspark_trt.contract.protocol import DraftBatch, DraftEngine, DraftOutput
from dspark_trt.engines.device.buffers import Arrays, FetchedOutputs, Layout, StagedInputs
from dspark_trt.engines.device.cache import DeviceCache
from dspark_trt.engines.device.pages import DevicePages
from dspark_trt.engines.device.select import VERIFY_LEN
from dspark_trt.engines.row_groups import Int64


@dataclass(frozen=True, slots=True)
class DraftCall:
    """A draft block of some requests, padded: its host inputs and where they go."""

    rows: Int64  # that are written, without padding
    past_lengths: Int64
    num_requests: int  # that draft, without padding
    num_slots: int
    shape: Hashable  # the bucket
    parts: tuple[tuple[Layout, Arrays], ...]  # one behind the other


class DeviceDrafter(DraftEngine, Protocol):
    """A draft engine whose block can be sent and enqueued together with what follows it."""

    dims: DrafterDims
    inputs: StagedInputs
    fetched: FetchedOutputs  # draft_ids and confidence_logits [R, G], and verify_len [R] of the selection
    select_begin: int  # where in `inputs` those of the selection stand: behind those of any draft

    @property
    def cache(self) -> DeviceCache | DevicePages:
        """Rows of its own, or pages that the target's rows have, too."""
        ...

    def draft_call(self, batch: DraftBatch) -> DraftCall:
        """Raises CapacityError when the batch exceeds the limits."""
        ...

    def enqueue(self, call: DraftCall) -> DraftOutput:
        """Enqueue a call whose inputs are on their way. Its slots beyond `num_slots` are undefined."""
        ...


def fetched_outputs(dims: DrafterDims, device: torch.device) -> FetchedOutputs:
    """What the host learns of a block."""
    small = [each for each in drafts(dims, dims.gamma) if each.name != bindings.DRAFT_LOGITS]
    outputs = [*small, Binding(VERIFY_LEN, "int64", ("R",))]
    return FetchedOutputs(Layout(outputs, {"R": dims.limits.max_requests}), device)


def whole_block(uniforms: NDArray[np.float32], gamma: int) -> NDArray[np.float32]:
    """Zeros for the slots that nobody asked for."""
    return np.pad(uniforms, ((0, 0), (0, gamma - uniforms.shape[1])))
