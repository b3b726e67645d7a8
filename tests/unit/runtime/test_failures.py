"""What fails ends the requests that it belongs to, and no others: engine calls, moves, logits, drafts, decoding."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from dspark_trt.contract.protocol import DraftBatch, DraftOutput, TargetBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.loop import ENGINE_FAILED
from tests.support.loops import ADAPTIVE, FIXED, GAMMA, OFF, Parts, plain, prompt_of, request


@pytest.mark.parametrize("name", ["forward", "ingest", "draft"])
def test_a_failed_engine_call_ends_its_requests_and_the_loop_goes_on(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts = Parts()
    parts.submit(request(0, prompt_of(4)), request(1, prompt_of(5)))
    parts.step(3)
    engine = parts.target if name == "forward" else parts.drafter
    engine.failures.append(name)
    parts.submit(*(request(index, prompt_of(index)) for index in range(2, 6)))
    with caplog.at_level(logging.ERROR):
        outputs = parts.finish()
    failed = {each for each, output in outputs.items() if output.last.finish_reason == "error"}
    assert failed == ({"0", "1", "2", "3"} if name == "forward" else {"0", "1"})
    for each in failed:
        assert outputs[each].last.error == ENGINE_FAILED
        assert outputs[each].last.statistics is not None
    assert "as the test wants it" in caplog.text, "the cause is logged, and only there"
    for index in range(2, 6):
        if str(index) not in failed:
            assert outputs[str(index)].token_ids == plain(prompt_of(index))
    assert parts.loop.num_running == 0


@pytest.mark.parametrize("engine", ["target", "drafter"])
def test_a_failed_move_ends_the_request_that_was_to_move(engine: str) -> None:
    parts = Parts()
    parts.submit(*(request(index, prompt_of(3, index), max_tokens=6 + 20 * (index > 0)) for index in range(4)))
    getattr(parts, engine).failures.append("move_row")
    outputs = parts.finish()
    reasons = {name: output.last.finish_reason for name, output in outputs.items()}
    assert reasons == {"0": "length", "1": "length", "2": "length", "3": "error"}
    for index in (1, 2):
        assert outputs[str(index)].token_ids == plain(prompt_of(3, index), 26)


def test_target_logits_that_are_not_finite_fail_one_request() -> None:
    parts = Parts(OFF)

    def poison(batch: TargetBatch, logits: np.ndarray) -> None:
        if len(parts.target.batches) == 5:
            logits[1, 3] = np.nan

    parts.target.edit_logits = poison
    parts.submit(*(request(index, prompt_of(3, index)) for index in range(3)))
    outputs = parts.finish()
    assert [outputs[str(index)].last.finish_reason for index in range(3)] == ["length", "error", "length"]
    assert len(outputs["1"].token_ids) == 4
    assert "not finite" in str(outputs["1"].last.error)
    assert outputs["2"].token_ids == plain(prompt_of(3, 2))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "config", [FIXED, *ADAPTIVE, SchedulerConfig("threshold", threshold=0.2)], ids=lambda c: c.mode
)
def test_a_drafter_gone_mad_changes_no_output(config: SchedulerConfig, poison: float) -> None:
    """D27: logits, confidences and ids of the drafter are nonsense; greedy text stays the target's."""
    parts = Parts(config)

    def poison_output(batch: DraftBatch, output: DraftOutput) -> None:
        call = parts.drafter.num_calls["draft"]
        if output.draft_logits is not None:
            output.draft_logits[:, call % GAMMA, :] = poison
        output.confidence_logits[:, (call + 2) % GAMMA] = poison
        if call % 3 == 0:
            output.draft_ids[:, call % GAMMA] = (-1, 16, 10**9)[call % 9 // 3]

    parts.drafter.edit_output = poison_output
    parts.submit(*(request(index, prompt_of(3, index)) for index in range(4)))
    sampled = request("sampled", prompt_of(2), temperature=1.0, seed=3)
    parts.submit(sampled)
    outputs = parts.finish()
    for index in range(4):
        assert outputs[str(index)].token_ids == plain(prompt_of(3, index))
    assert outputs["sampled"].last.finish_reason == "length"
    assert all(0 <= token < 16 for token in outputs["sampled"].token_ids)


def test_a_decode_that_raises_fails_one_request(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [(0,), (1,), (2,), (0, 1), (1, 2), (2, 0)]
    expected = [plain(prompt, 12) for prompt in prompts]
    unspeakable = next(token for token in range(3, 16) if 0 < sum(token in ids for ids in expected) < 6)

    def decode(ids: Any) -> str:
        if unspeakable in ids:
            raise ValueError("no such token")
        return "x" * len(ids)

    parts = Parts(decode=decode)
    parts.submit(*(request(index, prompt, max_tokens=12) for index, prompt in enumerate(prompts)))
    with caplog.at_level(logging.ERROR):
        outputs = parts.finish()
    reasons = [outputs[str(index)].last.finish_reason for index in range(6)]
    assert set(reasons) == {"length", "error"}
    for index, reason in enumerate(reasons):
        if reason == "length":
            assert outputs[str(index)].token_ids == expected[index]
        else:
            assert outputs[str(index)].last.error == (
                "the generated tokens cannot be turned into text; report this with the request"
            )
    assert "no such token" in caplog.text
