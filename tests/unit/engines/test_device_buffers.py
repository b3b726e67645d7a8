"""Staged inputs and fetched outputs: places, alignment,
and that pinned memory is not written while a copy may read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.contract.bindings import Binding
from dspark_trt.engines.device import buffers as device_buffers
from dspark_trt.engines.device.buffers import ALIGNMENT_BYTES, NUM_HOST_PIECES, FetchedOutputs, Layout, StagedInputs

CPU = torch.device("cpu")
BINDINGS = (
    Binding("ids", "int64", ("R", 3)),
    Binding("halves", "float16", ("R",)),
    Binding("weights", "float32", ("R", 5)),
    Binding("one", "int64", (1,)),
)


def arrays(count: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "ids": random.integers(-9, 9, (count, 3)),
        "halves": random.random(count, dtype=np.float32).astype(np.float16),
        "weights": random.random((count, 5), dtype=np.float32),
        "one": np.array([seed]),
    }


def assert_holds(layout: Layout, memory: torch.Tensor, expected: dict[str, Any]) -> None:
    found = layout.tensors(memory)
    for name, array in expected.items():
        assert found[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(found[name].numpy(), array)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 100])
def test_tensors_are_aligned_and_do_not_overlap(count: int) -> None:
    layout = Layout(BINDINGS, {"R": count}, begin=512)
    memory = torch.zeros(layout.end, dtype=torch.uint8)
    offsets = [each.data_ptr() - memory.data_ptr() for each in layout.tensors(memory).values()]
    assert offsets[0] == 512
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
    staged = StagedInputs(layout.end, CPU)
    staged.send((layout, arrays(count)))
    assert_holds(layout, staged.memory, arrays(count))


def test_layouts_side_by_side_are_sent_at_once_and_keep_their_places() -> None:
    first, second = Layout(BINDINGS, {"R": 4}), Layout(BINDINGS, {"R": 9}, begin=4096)
    staged = StagedInputs(second.end, CPU)
    address = staged.memory.data_ptr()
    for seed in range(2 * NUM_HOST_PIECES):
        staged.send((first, arrays(4, seed)), (second, arrays(9, seed + 1)))
        assert_holds(first, staged.memory, arrays(4, seed))
        assert_holds(second, staged.memory, arrays(9, seed + 1))
    assert staged.memory.data_ptr() == address


def test_a_piece_is_written_again_only_after_its_copy_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int]] = []

    class Piece(device_buffers._HostPiece):
        def wait_until_copied(self) -> None:
            log.append(("wait", id(self)))

        def copy_enqueued(self, device: torch.device) -> None:
            log.append(("copied", id(self)))

    monkeypatch.setattr(device_buffers, "_HostPiece", Piece)
    layout = Layout(BINDINGS, {"R": 2})
    staged = StagedInputs(layout.end, CPU)
    for seed in range(2 * NUM_HOST_PIECES + 1):
        staged.send((layout, arrays(2, seed)))
    pieces = [piece for what, piece in log if what == "copied"]
    assert log == [(what, piece) for piece in pieces for what in ("wait", "copied")]
    assert len(set(pieces)) == NUM_HOST_PIECES
    assert pieces[:NUM_HOST_PIECES] == pieces[NUM_HOST_PIECES : 2 * NUM_HOST_PIECES], "the one longest ago comes next"


def test_fetched_outputs_are_those_of_the_moment_and_stay_the_reader_s_own() -> None:
    layout = Layout(BINDINGS, {"R": 3})
    fetched = FetchedOutputs(layout, CPU)
    for seed in range(3):
        expected = arrays(3, seed)
        for name, array in expected.items():
            fetched.tensors[name].copy_(torch.from_numpy(array))
        wait = fetched.fetch()
        fetched.tensors["ids"].fill_(77)  # what runs behind the copy
        found = wait()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
        found["ids"][:] = -1
        np.testing.assert_array_equal(wait()["ids"], expected["ids"])


def test_outputs_that_were_fetched_again_cannot_be_read() -> None:
    fetched = FetchedOutputs(Layout(BINDINGS, {"R": 1}), CPU)
    late = fetched.fetch()
    fetched.fetch()
    with pytest.raises(AssertionError, match="fetched again"):
        late()
