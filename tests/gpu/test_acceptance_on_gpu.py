"""The compiled kernels of Acceptance on a GPU: against the reference and the runtime's slot loop, in poisoned
surroundings, at the vocabulary of Qwen3 too, and how long they take there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt_plugins.acceptance.form import ACCEPTED, AcceptanceForm
from dspark_trt_plugins.acceptance.launches import AcceptanceOperation
from dspark_trt_plugins.acceptance.reference import acceptance
from dspark_trt_plugins.launch import TorchOperation

from tests.gpu.cases import run_guarded
from tests.gpu.conftest import Compiler
from tests.support.acceptance_cases import Arrays, Block, random_case

SMALL = AcceptanceForm(300, 4, block_tokens=128, segment_blocks=2, num_candidates=128)
QWEN3 = AcceptanceForm(151936, 8)
DRAWN = (-2, -2, -2)
BLOCKS = [
    Block(DRAWN),
    Block(DRAWN, temperature=0.0, reports=True),
    Block(DRAWN, temperature=0.6, top_k=20, top_p=0.95, reports=True),
    Block(DRAWN, temperature=0.9, is_drawn=False, min_p=0.05),
    Block(DRAWN, temperature=5.0, top_p=0.99),
    Block(DRAWN, temperature=1.0, top_p=0.9),
    Block(),
    Block(DRAWN, repetition_penalty=1.3, edits={3: {"bias": 5.0}, 7: {"masks": 0b101}, 20: {"is_seen": 1}}),
]


def assert_nearly_all_outcomes_are_those_of_the_reference(found: Arrays, inputs: Arrays, form: AcceptanceForm) -> None:
    """A GPU's exp differs in the last bits: where a uniform lies as close to a border, either side is right."""
    expected = acceptance(form, inputs)
    num_other = int((found["outcomes"] != expected["outcomes"]).sum())
    assert num_other <= max(len(expected["outcomes"]) // 100, 1), (found["outcomes"], expected["outcomes"])
    reported = inputs["reported_rows"]
    told = (expected["outcomes"][reported] >= ACCEPTED) & (found["outcomes"] == expected["outcomes"])[reported]
    np.testing.assert_allclose(found["log_probs"][told], expected["log_probs"][told], atol=1e-4)
    np.testing.assert_array_equal(found["top_ids"][told], expected["top_ids"][told])


@pytest.mark.parametrize("form", [SMALL, QWEN3], ids=["small", "qwen3"])
@pytest.mark.parametrize("seed", range(3))
def test_outcomes_are_those_of_the_reference(form: AcceptanceForm, seed: int, compile_for_gpu: Compiler) -> None:
    operation = AcceptanceOperation(form)
    inputs = random_case(form, BLOCKS, seed)
    found = run_guarded(operation, TorchOperation(operation, compile_for_gpu(operation)), inputs)
    assert_nearly_all_outcomes_are_those_of_the_reference(found, inputs, form)


def test_draws_behind_rejections_and_bonuses_follow_the_target(compile_for_gpu: Compiler) -> None:
    """Of 20,000 blocks of one draft the first tokens: chi-square; had the words been random, it would fail falsely with
    probability 1e-6."""
    form, num_blocks = AcceptanceForm(12, 2), 20000
    logits = np.random.default_rng(0).normal(0, 1, 12)
    inputs = random_case(form, [Block((-2,))] * num_blocks, seed=1)
    inputs["logits"] = np.tile(logits.astype(np.float32), (2 * num_blocks, 1))
    operation = AcceptanceOperation(form)
    found = run_guarded(operation, TorchOperation(operation, compile_for_gpu(operation)), inputs)
    first = found["outcomes"][::2]
    tokens = np.where(first == ACCEPTED, inputs["draft_ids"][::2], first)
    expected = num_blocks * np.exp(logits) / np.exp(logits).sum()
    counts = np.bincount(tokens, minlength=12)
    assert (first == ACCEPTED).any()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    tail = torch.special.gammaincc(*torch.tensor([11 / 2, statistic / 2], dtype=torch.float64))
    assert float(tail) > 1e-6


@pytest.mark.parametrize("num_requests", [1, 32])
def test_qwen3s_defaults_take_little_time(num_requests: int, compile_for_gpu: Compiler, record_property: Any) -> None:
    """The median is printed and reported; a millisecond at 32 requests would be dear beside a step."""
    operation = AcceptanceOperation(QWEN3)
    blocks = [Block((-2,) * 7, temperature=0.6, top_k=20, top_p=0.95)] * num_requests
    inputs = {name: torch.from_numpy(value).cuda() for name, value in random_case(QWEN3, blocks).items()}
    run = TorchOperation(operation, compile_for_gpu(operation))
    times = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(inputs)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    median = float(np.median(times[5:]))
    print(f"acceptance, {num_requests} requests: {median:.3f} ms")
    record_property(f"acceptance_ms_{num_requests}", median)
    assert median < 5.0
