"""A StepEngine that fails, selects wrongly or drafts nonsense, and rows that are nearly full."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from dspark_trt.contract.protocol import DraftBatch, DraftOutput
from dspark_trt.runtime.loop import ENGINE_FAILED
from tests.support.step_engine_workloads import GAMMA, LIMITS, Parts, plain, prompt_of, request
from tests.support.toy_engines import FLAT


@pytest.mark.parametrize("k", range(8))
def test_reservations_fit_a_row_that_is_nearly_full(k: int) -> None:
    prompt = prompt_of(LIMITS.max_seq_len - k)
    parts = Parts(skill=1.0, table=FLAT)
    parts.submit(request("a", prompt, max_tokens=100, ignore_eos=True))
    assert parts.finish()["a"].token_ids == plain(prompt, k + 1)


@pytest.mark.parametrize("call", ["draft_and_verify", "wait"])
def test_a_failed_call_ends_all_its_requests_and_the_loop_goes_on(call: str, caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts()
    requests = {str(index): request(index, prompt_of(3, index), ignore_eos=True) for index in range(8)}
    parts.submit(*(requests[name] for name in "0123"))
    parts.step(2)
    parts.submit(*(requests[name] for name in "4567"))
    parts.step_engine.failures.append(call)
    with caplog.at_level(logging.ERROR):
        parts.step()
    failed = {name for name, output in parts.outputs.items() if output.last.finish_reason == "error"}
    assert failed == set("01234"), "four that decode, and the prompt that was read beside them"
    assert {parts.outputs[name].last.error for name in failed} == {ENGINE_FAILED}
    assert "as the test wants it" in caplog.text, "the cause is logged, and only there"
    outputs = parts.finish()
    for name in "567":
        assert outputs[name].token_ids == plain(requests[name].prompt_ids)
    assert parts.loop.num_running == 0


def too_many(verify_lens: np.ndarray) -> None:
    verify_lens[0] = GAMMA + 1


def one_less(verify_lens: np.ndarray) -> None:
    verify_lens[verify_lens.argmax()] -= 1


def negative(verify_lens: np.ndarray) -> None:
    verify_lens[:2] += (-GAMMA - 1, GAMMA + 1)


def forced_are_cut(verify_lens: np.ndarray) -> None:
    verify_lens[:] = verify_lens[::-1].copy()


@pytest.mark.parametrize("edit", [too_many, one_less, negative, forced_are_cut])
def test_a_device_that_selects_wrongly_fails_its_requests(
    edit: Callable[[np.ndarray], None], caplog: pytest.LogCaptureFixture
) -> None:
    parts = Parts(skill=-1.0)
    parts.submit(*(request(name, temperature=1.0, seed=7, ignore_eos=True) for name in ("a", "duplicate")))
    parts.submit(request("b", (5, 6), ignore_eos=True))
    parts.step(4)  # by now the duplicates are verified in full and the third not at all
    parts.step_engine.edit_verify_lens = edit
    with caplog.at_level(logging.ERROR):
        parts.step()
    assert {output.last.finish_reason for output in parts.outputs.values()} == {"error"}
    assert "selection of drafts on the device: expected" in caplog.text
    parts.step_engine.edit_verify_lens = None
    parts.submit(request("after", (4, 4), ignore_eos=True))
    assert parts.finish()["after"].token_ids == plain((4, 4))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_drafter_gone_mad_changes_no_output(poison: float) -> None:
    """D27: ids that are no tokens were verified before the host saw them;
    they, and all behind them, count as not proposed."""
    parts = Parts(table=FLAT)

    def poison_output(batch: DraftBatch, output: DraftOutput) -> None:
        call = parts.drafter.num_calls["draft"]
        if output.draft_logits is not None:
            output.draft_logits[:, call % GAMMA, :] = poison
        output.confidence_logits[:, (call + 2) % GAMMA] = poison
        if call % 3 == 0:
            output.draft_ids[:, call % GAMMA] = (-1, 16, 10**9)[call % 9 // 3]

    parts.drafter.edit_output = poison_output
    parts.submit(*(request(index, prompt_of(3, index), ignore_eos=True) for index in range(4)))
    parts.submit(request("sampled", prompt_of(2), temperature=1.0, seed=3, ignore_eos=True))
    outputs = parts.finish()
    for index in range(4):
        assert outputs[str(index)].token_ids == plain(prompt_of(3, index))
    assert outputs["sampled"].last.finish_reason == "length"
    assert all(0 <= token < 16 for token in outputs["sampled"].token_ids)
    assert parts.loop.totals.num_drafts_accepted > 0
