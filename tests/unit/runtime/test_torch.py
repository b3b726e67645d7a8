"""The loop on engines whose arrays are PyTorch tensors gives what it gives on NumPy arrays,
and needs no PyTorch itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_trt.contract.protocol import DraftBatch, DraftOutput, IngestBatch, SelectedOutput, TargetBatch, TargetOutput
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime import arrays
from dspark_trt.runtime.acceptance import accept
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.runtime.state import new_state
from dspark_trt.runtime.verification import Segment
from tests.support.toy_engines import LIMITS, ToyDrafter, ToyLanguage, ToyTarget, letters, make_loop, run
from tests.support.toy_step_engine import ToyStepEngine

LANGUAGE = ToyLanguage(vocab_size=16, order=3, num_patterns=499)


class TorchTarget(ToyTarget):
    def forward(self, batch: TargetBatch) -> TargetOutput:
        output = super().forward(batch)
        return TargetOutput(logits=torch.tensor(output.logits), taps=torch.tensor(output.taps))


class TorchDrafter(ToyDrafter):
    def ingest(self, batch: IngestBatch) -> None:
        assert isinstance(batch.taps, torch.Tensor), "taps stay in the engine's library"
        super().ingest(replace(batch, taps=batch.taps.numpy()))

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        output = super().draft(batch, ingest)
        return DraftOutput(
            draft_ids=torch.tensor(output.draft_ids),
            draft_logits=None if output.draft_logits is None else torch.tensor(output.draft_logits),
            confidence_logits=torch.tensor(output.confidence_logits),
        )


class TorchStepEngine(ToyStepEngine):
    def draft_and_verify(self, *arguments: Any) -> SelectedOutput:
        output = super().draft_and_verify(*arguments)
        target = TargetOutput(torch.from_numpy(output.target.logits), torch.from_numpy(output.target.taps))
        logits = None if output.draft_logits is None else torch.from_numpy(output.draft_logits)
        return SelectedOutput(output.wait, logits, target)  # the same memory: still late


def outputs_of(target: Any, drafter: Any, config: SchedulerConfig, *, fused: bool = False) -> dict[str, Any]:
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.7, "logit_bias": {3: -100.0}, "bad_words": ((1, 2),), "min_tokens": 5, "num_log_probs": 3},
        {"temperature": 1.0},
        {"presence_penalty": 0.5, "num_log_probs": 0},
    ]
    requests = [
        GenerationRequest(
            request_id=str(index),
            prompt_ids=tuple(range(1 + index)),
            sampling=SamplingParams(max_tokens=20, seed=index, **each),
        )
        for index, each in enumerate(settings)
    ]
    engines = target(LANGUAGE, LIMITS), drafter(LANGUAGE, LIMITS, gamma=5)
    step_engine = TorchStepEngine(*engines) if fused else None
    return run(make_loop(*engines, config, eos_token_ids=[7], step_engine=step_engine), requests)


@pytest.mark.parametrize(
    ("mode", "fused"),
    [("off", False), ("fixed", False), ("early_stop", False), ("lagged_budget", False), ("lagged_budget", True)],
)
def test_tensors_give_the_same_tokens_and_log_probs(mode: Any, fused: bool) -> None:
    on_numpy = outputs_of(ToyTarget, ToyDrafter, SchedulerConfig(mode, corrects=False))
    on_torch = outputs_of(TorchTarget, TorchDrafter, SchedulerConfig(mode, corrects=False), fused=fused)
    for name, expected in on_numpy.items():
        assert on_torch[name].token_ids == expected.token_ids
        assert on_torch[name].text == expected.text
        np.testing.assert_allclose(on_torch[name].log_probs, expected.log_probs, atol=1e-5)
        assert [[token for token, _ in top] for top in on_torch[name].top_log_probs] == [
            [token for token, _ in top] for top in expected.top_log_probs
        ]
        assert isinstance(on_torch[name].token_ids[0], int)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: numbers read, and shapes that depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


def num_waits(num_requests: int, params: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> int:
    """Of an acceptance in which every request's one draft is its most probable token, and accepted."""
    logits = np.random.default_rng(1).normal(size=(2 * num_requests, 50)).astype(np.float32)
    segments = []
    for index in range(num_requests):
        sampling = SamplingParams(seed=index, **params[index % len(params)])
        request = GenerationRequest(request_id="", prompt_ids=(0,), sampling=sampling)
        state = new_state(request, max_seq_len=100, eos_token_ids=(), decode=letters)
        state.draw_words(2)
        segments.append(Segment(state, 2 * index, 2, 2 * index, [int(logits[2 * index].argmax())], index, 1))
    block = DraftBlock(
        draft_ids=np.array([segment.draft_ids for segment in segments]),
        draft_logits=torch.from_numpy(logits[::2, None]),
        temperatures=np.array([segment.state.params.temperature for segment in segments], dtype=np.float32),
        confidence_logits=np.zeros((num_requests, 1), np.float32),
        num_usable=np.ones(num_requests, np.int64),
    )
    waits = Waits()

    def to_device(array: Any, to: str) -> Any:
        waits.count += 1
        return array.to(to)

    monkeypatch.setattr(arrays, "to_device", to_device)
    with waits:
        results = accept(segments, torch.from_numpy(logits), block)
    assert [result.num_accepted_drafts for result in results] == [1] * num_requests
    return waits.count


GREEDY = {"temperature": 0.0}
TRUNCATED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01}


@pytest.mark.parametrize(("params", "per_slot"), [([GREEDY], 1), ([{"temperature": 1.0}], 2), ([TRUNCATED, GREEDY], 5)])
def test_the_host_waits_per_slot_and_not_per_request(
    params: list[dict[str, Any]], per_slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all that take the argmax; else for what is finite, and for the tests or the draws; top_p waits twice."""
    assert [num_waits(count, params, monkeypatch) for count in (2, 4, 32)] == [2 * per_slot] * 3


def test_the_runtime_imports_no_array_library_but_numpy() -> None:
    code = (
        "import sys, dspark_trt.runtime.loop; "
        "print([name for name in ('torch', 'onnxruntime', 'onnx', 'tensorrt', 'pydantic') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
