"""The device runtime on a GPU, over PyTorch sessions and the plugins' compiled kernels:
everything but TensorRT's own kernels.

Identity is tested in float32, with TF32 off. The oracle is plain PyTorch on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.contract.protocol import DraftBatch, EngineLimits, IngestBatch, TargetBatch
from dspark_trt.engines.device.engines import DeviceEngines, open_device_engines
from dspark_trt.engines.device.graphs import CudaGraphCapture
from dspark_trt.reference.engines import open_reference_engines
from dspark_trt.reference.on_device import DevicePrecision, open_device_reference_engines, open_reference_sessions
from tests.gpu.device_steps import SLEEP_CYCLES, Rows, SleepyTarget, prepare_step
from tests.support.device_cases import (
    HEADS,
    LIMITS,
    SMALL_VOCABULARY,
    Pair,
    check_distribution,
    check_greedy,
    check_same_up_to_ties,
    device_loop,
    greedy_requests,
    make_pair,
    oracle_tokens,
    schedulers,
    to_numpy,
    tokens_of,
)

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TOLERANCE = 2e-4  # of float32 logits whose standard deviation is 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> dict[str, list[int]]:
    return oracle_tokens(pair, greedy_requests())


def open_on_gpu(pair: Pair, precision: DevicePrecision = "fp32", **options: Any) -> DeviceEngines:
    limits = options.pop("limits", LIMITS)
    return open_device_reference_engines(
        pair.target, pair.drafter, limits=limits, precision=precision, device=DEVICE, **options
    )


@pytest.mark.parametrize("name", schedulers(gamma=5))
def test_greedy_output_is_the_targets_at_every_verify_length(
    name: str, pair: Pair, expected: dict[str, list[int]]
) -> None:
    check_greedy(open_on_gpu(pair), pair, schedulers(pair.gamma)[name], expected)


@pytest.mark.parametrize("mode", ["early_stop", "lagged_budget"])
@pytest.mark.parametrize("head", [head for head in HEADS if head != "vanilla"])
def test_greedy_output_is_the_targets_with_every_kind_of_drafter(mode: str, head: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, drafter=HEADS[head])
    check_greedy(open_on_gpu(pair), pair, schedulers(pair.gamma)[mode], oracle_tokens(pair, greedy_requests()))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_greedy_output_in_16_bits_differs_at_near_ties_only(precision: DevicePrecision, pair: Pair) -> None:
    outputs = {
        mode: tokens_of(device_loop(open_on_gpu(pair, precision), schedulers(pair.gamma)[mode]), greedy_requests())
        for mode in ("off", "lagged_budget")
    }
    check_same_up_to_ties(pair, outputs["lagged_budget"], outputs["off"], largest_gap=0.3)


@pytest.mark.parametrize("mode", ["off", "fixed 2", "early_stop", "lagged_budget"])
def test_sampled_output_is_distributed_as_the_target_says(mode: str, tmp_path: Path) -> None:
    """The false-failure probability is in `check_distribution`."""
    pair = make_pair(tmp_path, target={"vocab_size": SMALL_VOCABULARY, "layers": 3}, drafter={"gamma": 2})
    engines = open_on_gpu(pair, limits=EngineLimits(max_requests=16, max_seq_len=32, max_batch_tokens=64))
    check_distribution(engines, pair, schedulers(pair.gamma)[mode], num_samples=2000)


def test_buckets_give_the_oracles_numbers_and_their_graphs_the_bits_of_eager_calls(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = []
    capture = CudaGraphCapture.capture

    def count(self: CudaGraphCapture, call: Callable[[], None]) -> Callable[[], None]:
        replay = capture(self, call)
        captured.append(replay is not call)  # the call itself comes back where it cannot be captured
        return replay

    monkeypatch.setattr(CudaGraphCapture, "capture", count)
    with_graphs, eager = open_on_gpu(pair), open_on_gpu(pair, use_cuda_graphs=False)
    oracle, _ = open_reference_engines(pair.target, pair.drafter, limits=LIMITS)
    rows = Rows(pair.gamma, np.random.default_rng(8))
    for index in range(60):
        batch = rows.prompts() if index == 0 else rows.verification()
        if (rows.past[batch.rows] + batch.query_lengths).max() > LIMITS.max_seq_len - pair.gamma:
            break
        found = [engines.target.forward(batch) for engines in (with_graphs, eager)]
        for output in ("logits", "taps"):
            assert torch.equal(*[getattr(each, output) for each in found]), f"{output}, step {index}"
        wanted = oracle.forward(batch)
        np.testing.assert_allclose(to_numpy(found[0].logits), wanted.logits, atol=TOLERANCE)
        np.testing.assert_allclose(to_numpy(found[0].taps), wanted.taps, atol=TOLERANCE)
        rows.commit(batch)
    assert index > 10
    assert len(captured) > 3
    assert all(captured)


def test_a_capture_that_cuda_voids_leaves_its_bucket_eager_and_the_others_with_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    capture, numbers = CudaGraphCapture(device), torch.zeros(4, device=device)

    def waits() -> None:
        numbers.add_(1)
        torch.cuda.synchronize()  # which a capture does not permit

    for call in (waits, lambda: numbers.add_(1)):
        capture.warm_up(call)
    assert capture.capture(waits) is waits
    assert "could not be captured" in caplog.text
    replay = capture.capture(lambda: numbers.add_(1))
    before = numbers.clone()
    waits()
    replay()
    replay()
    assert torch.equal(numbers, before + 3)


def test_moved_rows_go_on_where_they_were(pair: Pair) -> None:
    engines = open_on_gpu(pair)
    rows = Rows(pair.gamma, np.random.default_rng(2))
    prompts = rows.prompts()
    taps = engines.target.forward(prompts).taps.clone()
    engines.drafter.ingest(IngestBatch(taps, prompts.rows, prompts.past_lengths, prompts.query_lengths))
    past = prompts.query_lengths
    anchors, uniforms = np.array([3]), np.full((1, pair.gamma), 0.4, np.float32)
    found = []
    for row in (3, 1):
        if row == 1:
            engines.target.move_row(3, 1, int(past[3]))
            engines.drafter.move_row(3, 1, int(past[3]))
        where = np.array([row]), past[3:4]
        drafts = engines.drafter.draft(DraftBatch(where[0], anchors, where[1], np.array([0.9], np.float32), uniforms))
        one = np.ones(1, np.int64)
        verified = engines.target.forward(TargetBatch(anchors, *where, one, 1, np.array([0])))
        found.append((drafts.draft_logits.cpu(), verified.logits.cpu()))
    for before, after in zip(*found, strict=True):
        np.testing.assert_allclose(after, before, atol=1e-5)


def test_draft_select_and_verify_are_enqueued_without_waiting(pair: Pair) -> None:
    """The host gets the drafts while the verification is still running, and enqueued it long before it began."""
    opened = open_reference_sessions(pair.target, pair.drafter, limits=LIMITS, precision="fp32", device=DEVICE)
    sessions = replace(opened.sessions, target=SleepyTarget(opened.sessions.target))
    engines = open_device_engines(sessions, opened.target_dims, opened.drafter_dims, DEVICE)
    step = prepare_step(engines, pair)
    results = []
    for _ in range(2):  # the first call, then the capture of its graphs
        selected = engines.step.draft_and_verify(step.draft, step.select, step.plain)
        results.append((selected.wait(), selected.target.logits.clone(), selected.draft_logits.clone()))
    engines.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    done = torch.cuda.Event()
    try:
        torch.cuda._sleep(SLEEP_CYCLES)
        selected = engines.step.draft_and_verify(step.draft, step.select, step.plain)
        done.record()
        is_done_at_once = done.query()
        drafts = selected.wait()
        is_done_with_drafts = done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not is_done_at_once, "draft_and_verify waited for the device"
    assert not is_done_with_drafts, "wait waited for the verification"
    for earlier, logits, draft_logits in results:
        assert drafts.draft_ids.tolist() == earlier.draft_ids.tolist()
        assert drafts.verify_lens.tolist() == earlier.verify_lens.tolist()
        assert torch.equal(logits, selected.target.logits)
        assert torch.equal(draft_logits, selected.draft_logits)


def test_a_fused_step_gives_what_its_parts_give(pair: Pair) -> None:
    engines = open_on_gpu(pair)
    step = prepare_step(engines, pair)
    for _ in range(3):  # the first call, the capture, a replay
        selected = engines.step.draft_and_verify(step.draft, step.select, step.plain)
        drafts = selected.wait()
        fused, draft_logits = selected.target.logits.clone(), selected.draft_logits.clone()
        assert drafts.verify_lens[1] == 2, "forced drafts are all verified"
        assert drafts.verify_lens[3] == 0
        assert drafts.verify_lens[[0, 2]].sum() == step.select.num_admitted
        alone = engines.drafter.draft(step.draft)
        assert alone.draft_ids.tolist() == drafts.draft_ids.tolist()
        assert torch.equal(alone.draft_logits, draft_logits)
        tokens = [
            np.concatenate([step.plain.token_ids[row : row + 1], (drafts.draft_ids[row] if row < 3 else [])])[
                : 1 + length
            ]
            for row, length in enumerate(drafts.verify_lens)
        ]
        token_ids = np.concatenate(tokens).astype(np.int64)
        batch = replace(
            step.plain,
            token_ids=token_ids,
            query_lengths=1 + drafts.verify_lens,
            logit_rows=np.arange(len(token_ids)),
        )
        np.testing.assert_allclose(to_numpy(engines.target.forward(batch).logits), to_numpy(fused), atol=1e-5)
