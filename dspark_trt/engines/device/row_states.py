"""What is kept of each row's last ingested position, and the sessions that keep it and start from it.

A draft graph of one slot is run once for each slot of a block. All of that is one call to whoever binds it, so that it
is one CUDA graph: copies between the slots stay on the device, and nothing is waited for.

Shape letters: `R` requests, `G` gamma, `X` width of a row state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.bindings import Binding
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.draft_bindings import draft_inputs, draft_outputs, drafts
from dspark_trt.engines.device.session import DeviceSession, Tensors

STATE_ROWS = Binding("state_rows", "int64", ("R",))  # of the segments of an ingest: padding repeats the last one
Call = Callable[[], None]
_DRAFTS = (bindings.DRAFT_IDS, bindings.DRAFT_LOGITS, bindings.CONFIDENCE_LOGITS)


class ComposedSession(ABC):
    """A DeviceSession whose call is a call of a graph and what belongs to it."""

    def __init__(self, session: DeviceSession) -> None:
        self._session = session

    def run(self, tensors: Tensors) -> None:
        """Raises EngineBuildError when the backend fails."""
        self._composed(tensors, lambda inner: partial(self._session.run, inner))()

    def bind(self, tensors: Tensors) -> Call:
        """Raises EngineBuildError when the backend fails."""
        return self._composed(tensors, self._session.bind)

    @abstractmethod
    def _composed(self, tensors: Tensors, call: Callable[[Tensors], Call]) -> Call:
        """`call` makes a call of the graph on tensors."""
        ...


def row_states(dims: DrafterDims, device: torch.device) -> torch.Tensor:
    """Of all rows, [max_requests, X], zero at first."""
    dtype = getattr(torch, dims.row_state_type)
    return torch.zeros((dims.limits.max_requests, dims.row_state_width), dtype=dtype, device=device)


class KeepingStates(ComposedSession):
    """drafter_ingest.onnx: the state of each segment's last position goes to its row."""

    def __init__(self, session: DeviceSession, states: torch.Tensor) -> None:
        super().__init__(session)
        self._states = states
        self._found = torch.zeros_like(states)

    def _composed(self, tensors: Tensors, call: Callable[[Tensors], Call]) -> Call:
        rows = tensors[STATE_ROWS.name]
        found = self._found[: len(rows)]
        inner = {name: tensor for name, tensor in tensors.items() if name != STATE_ROWS.name}
        ingest = call(inner | {bindings.LAST_STATES: found})

        def keep() -> None:
            ingest()
            self._states.index_copy_(0, rows, found)

        return keep


class StartingFromStates(ComposedSession):
    """drafter_draft.onnx of a family that makes all slots in one call."""

    def __init__(self, session: DeviceSession, dims: DrafterDims, states: torch.Tensor) -> None:
        super().__init__(session)
        self._names = {each.name for each in (*draft_inputs(dims), *draft_outputs(dims))}
        self._states = states
        self._of_requests = torch.zeros_like(states)

    def _composed(self, tensors: Tensors, call: Callable[[Tensors], Call]) -> Call:
        rows = tensors[bindings.BLOCK_ROWS]
        of_requests = self._of_requests[: len(rows)]
        read = {name: tensor for name, tensor in tensors.items() if name in self._names}
        block = call(read | {bindings.ROW_STATES: of_requests})

        def draft() -> None:
            torch.index_select(self._states, 0, rows, out=of_requests)
            block()

        return draft


class SlotsInTurn(ComposedSession):
    """drafter_draft.onnx of one slot, as many times as there are slots: each begins where the one before it ended."""

    def __init__(self, session: DeviceSession, dims: DrafterDims, states: torch.Tensor) -> None:
        super().__init__(session)
        self._states = states
        count, device = dims.limits.max_requests, states.device
        # each begins where TensorRT takes an address
        self._tokens, self._lengths = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))
        self._uniforms = torch.zeros((count, 1), device=device)
        self._of_requests, self._next = torch.zeros_like(states), torch.zeros_like(states)
        self._drafts = {
            each.name: torch.zeros((count, *each.shape[1:]), dtype=getattr(torch, each.element_type), device=device)
            for each in drafts(dims, 1)
        }

    def _composed(self, tensors: Tensors, call: Callable[[Tensors], Call]) -> Call:
        """As many slots as `uniforms` [R, n] has."""
        count, num_slots = tensors[bindings.UNIFORMS].shape
        tokens, lengths = self._tokens[:count], self._lengths[:count]
        uniforms, of_requests, following = (x[:count] for x in (self._uniforms, self._of_requests, self._next))
        drafts = {name: tensor[:count] for name, tensor in self._drafts.items()}
        slot_call = call(
            tensors
            | drafts
            | {
                bindings.ANCHOR_IDS: tokens,
                bindings.PAST_LENGTHS: lengths,
                bindings.UNIFORMS: uniforms,
                bindings.ROW_STATES: of_requests,
                bindings.LAST_STATES: following,
            }
        )

        def draft() -> None:
            tokens.copy_(tensors[bindings.ANCHOR_IDS])
            lengths.copy_(tensors[bindings.PAST_LENGTHS])
            torch.index_select(self._states, 0, tensors[bindings.BLOCK_ROWS], out=of_requests)
            for slot in range(num_slots):
                place = slice(slot, slot + 1)
                uniforms.copy_(tensors[bindings.UNIFORMS][:, place])
                slot_call()
                for name in _DRAFTS:
                    tensors[name][:, place].copy_(drafts[name])
                tokens.copy_(drafts[bindings.DRAFT_IDS][:, 0])
                of_requests.copy_(following)
                lengths.add_(1)

        return draft
