"""Counts what an acceptance asks of a device: operations that it enqueues, and waits of the host.

On the CPU device, where the same calls of torch are made. Launches of Triton kernels count as one operation each; what
only makes another view of memory counts as none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_trt.engines.device import acceptance as device_acceptance
from dspark_trt.engines.device.buffers import FetchedBlock
from dspark_trt.runtime import arrays
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.runtime.state import new_state
from dspark_trt.runtime.verification import Segment
from tests.support.toy_engines import letters

_VIEWS = {"view", "as_strided", "slice", "select", "unsqueeze", "expand", "permute", "transpose", "alias", "detach"}
_VIEWS |= {"_unsafe_view", "lift_fresh", "squeeze", "t", "_reshape_alias", "empty"}


class DeviceCounts(TorchDispatchMode):
    """`names`: operations by name; `num_waits`: numbers or arrays read, and shapes that depend on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.num_waits = 0
        monkeypatch.setattr(arrays, "to_device", self._to_device)
        self._count_waits_of_copies(monkeypatch)
        monkeypatch.setattr(device_acceptance.DeviceAcceptance, "_run", self._launching(monkeypatch))

    @property
    def num_operations(self) -> int:
        return self.names.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or name in ("_local_scalar_dense", "nonzero"):
            self.num_waits += 1
        if name not in _VIEWS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))

    def _to_device(self, array: torch.Tensor, to: str) -> torch.Tensor:
        self.num_waits += 1
        self.names["copy to the host"] += 1
        return array.to(to)

    def _count_waits_of_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fetch = FetchedBlock.fetch

        def counted(block: FetchedBlock, layout: Any) -> Any:
            wait = fetch(block, layout)

            def waited() -> Any:
                self.num_waits += 1
                return wait()

            return waited

        monkeypatch.setattr(FetchedBlock, "fetch", counted)

    def _launching(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The operation's launches instead of what its reference asks of torch."""
        compute = device_acceptance.DeviceAcceptance._run

        def run(engine: Any, extents: Any, *rest: Any) -> None:
            for launch in engine._operation.launches(extents):
                self.names[f"kernel {launch.kernel}"] += 1
            with torch.utils._python_dispatch._disable_current_modes():
                compute(engine, extents, *rest)

        return run


def make_step(
    num_requests: int, params: Sequence[dict[str, Any]], *, gamma: int, vocab_size: int
) -> tuple[list[Segment], torch.Tensor, DraftBlock]:
    """A step in which every request has gamma drafts, each the most probable token of target and drafter."""
    num_rows = gamma + 1
    random = np.random.default_rng(1)
    logits = random.normal(size=(num_requests * num_rows, vocab_size)).astype(np.float32)
    logits[np.arange(len(logits)), random.integers(0, vocab_size, len(logits))] = 30.0
    segments = []
    for index in range(num_requests):
        sampling = SamplingParams(seed=index, **params[index % len(params)])
        request = GenerationRequest(request_id="", prompt_ids=(0, 1), sampling=sampling)
        state = new_state(request, max_seq_len=100, eos_token_ids=(), decode=letters)
        state.draw_words(num_rows)
        first = index * num_rows
        drafts = logits[first : first + gamma].argmax(axis=1).tolist()
        segments.append(Segment(state, first, num_rows, first, drafts, index, gamma))
    by_request = logits.reshape(num_requests, num_rows, vocab_size)
    block = DraftBlock(
        draft_ids=np.array([segment.draft_ids for segment in segments]),
        draft_logits=torch.from_numpy(by_request[:, :gamma].copy()),
        temperatures=np.array([segment.state.params.temperature for segment in segments], dtype=np.float32),
        confidence_logits=np.zeros((num_requests, gamma), np.float32),
        num_usable=np.full(num_requests, gamma, np.int64),
    )
    return segments, torch.from_numpy(logits), block
