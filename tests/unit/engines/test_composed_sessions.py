"""Calls that are several calls of a graph: each slot begins where the one before it ended, and all of it could be one
CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, drafter_dims
from dspark_trt.contract.draft_bindings import drafts
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.device.row_states import ComposedSession, SlotsInTurn, StartingFromStates, row_states
from dspark_trt.engines.device.session import Tensors
from tests.support.conversations import read_pair
from tests.support.eagle3_dialects import write_eagle3
from tests.support.factories import write_target

LIMITS = EngineLimits(max_requests=4, max_seq_len=64, max_batch_tokens=32)
CPU = torch.device("cpu")
COPIES = {"copy_", "index_select", "add_", "index_copy_"}  # what may run between the calls of a graph
VIEWS = {"slice", "select", "unsqueeze", "squeeze", "view", "detach", "alias"}


class Counting:
    """A DeviceSession of a draft graph of one slot: drafts are token + 1, and states are those before, plus 1."""

    def __init__(self) -> None:
        self.num_bound = 0
        self.lengths: list[list[int]] = []

    def run(self, tensors: Tensors) -> None:
        self.bind(tensors)()

    def bind(self, tensors: Tensors) -> Callable[[], None]:
        self.num_bound += 1

        def call() -> None:
            with torch._C._DisableTorchDispatch():  # a backend's own work
                self.lengths.append(tensors[bindings.PAST_LENGTHS].tolist())
                tensors[bindings.DRAFT_IDS][:, 0] = tensors[bindings.ANCHOR_IDS] + 1
                tensors[bindings.DRAFT_LOGITS].fill_(0.5)
                tensors[bindings.CONFIDENCE_LOGITS].copy_(tensors[bindings.UNIFORMS])
                if bindings.LAST_STATES in tensors:
                    tensors[bindings.LAST_STATES].copy_(tensors[bindings.ROW_STATES] + 1)

        return call


class OnlyCopies(TorchDispatchMode):
    """Nothing that waits for a value, makes a shape of one or computes anew: a CUDA graph could hold it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ in COPIES | VIEWS, func
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def dims(tmp_path_factory: pytest.TempPathFactory) -> DrafterDims:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", layers=3)
    drafter = write_eagle3(folder / "drafter", target, "deepspec", layer_ids=(0, 1))
    return drafter_dims(read_pair(target, drafter)[1].spec, limits=LIMITS, attention="standard")


def block_of(dims: DrafterDims, num_slots: int) -> Tensors:
    rows = torch.tensor([3, 1])
    block = {each.name: torch.zeros((2, *each.shape[1:])) for each in drafts(dims, dims.gamma)}
    block[bindings.DRAFT_IDS] = torch.full((2, dims.gamma), -1)
    return block | {
        bindings.ANCHOR_IDS: torch.tensor([10, 20]),
        bindings.PAST_LENGTHS: torch.tensor([7, 9]),
        bindings.TEMPERATURES: torch.zeros(2),
        bindings.UNIFORMS: torch.arange(2.0 * dims.gamma).view(2, -1)[:, :num_slots],
        bindings.BLOCK_ROWS: rows,
        bindings.ROW_REQUESTS: torch.tensor([0, 1, 0, 0]),
        bindings.ROW_QUERY_LENGTHS: torch.tensor([0, 1, 0, 1]),
    }


@pytest.mark.parametrize("num_slots", [1, 3])
def test_each_slot_begins_where_the_one_before_it_ended(dims: DrafterDims, num_slots: int) -> None:
    assert dims.is_slot_by_slot
    states = row_states(dims, CPU)
    states += torch.arange(4.0)[:, None]
    inner, block = Counting(), block_of(dims, num_slots)
    call = SlotsInTurn(inner, dims, states).bind(block)
    for _ in range(2):  # what one call leaves behind is not in the way of the next
        inner.lengths.clear()
        with OnlyCopies():
            call()
        assert inner.lengths == [[7 + slot, 9 + slot] for slot in range(num_slots)]
    expected = torch.tensor([[11, 12, 13], [21, 22, 23]])
    assert torch.equal(block[bindings.DRAFT_IDS][:, :num_slots], expected[:, :num_slots])
    assert (block[bindings.DRAFT_IDS][:, num_slots:] == -1).all()
    assert torch.equal(block[bindings.CONFIDENCE_LOGITS][:, :num_slots], block[bindings.UNIFORMS])
    assert block[bindings.DRAFT_LOGITS][:, :num_slots].eq(0.5).all()
    assert inner.num_bound == 1
    assert torch.equal(states[:, 0], torch.arange(4.0)), "a draft changes no row's state"


def test_a_family_of_one_call_starts_from_the_states_of_its_rows(dims: DrafterDims) -> None:
    states = row_states(dims, CPU)
    states += torch.arange(4.0)[:, None]
    seen: list[torch.Tensor] = []

    class Seeing(Counting):
        def bind(self, tensors: Tensors) -> Callable[[], None]:
            return lambda: seen.append(tensors[bindings.ROW_STATES][:, 0].clone())

    session: ComposedSession = StartingFromStates(Seeing(), dims, states)
    session.bind(block_of(dims, 1))()
    assert torch.equal(seen[0], torch.tensor([3.0, 1.0]))
