"""What acceptance asks of a device in a step: at most 25 operations and one wait, whatever the requests ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dspark_trt_plugins.acceptance.form import AcceptanceForm
from dspark_trt_plugins.acceptance.launches import AcceptanceOperation

from dspark_trt.engines.device.acceptance import DeviceAcceptance
from dspark_trt.runtime.acceptance import accept
from dspark_trt.runtime.fused_acceptance import Decided, accept_batch, results_of
from tests.support.device_counts import DeviceCounts, make_step

GAMMA, VOCABULARY = 7, 97
GREEDY: dict[str, Any] = {"temperature": 0.0}
PUBLISHED: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}  # Qwen3's generation_config.json
EVERYTHING: dict[str, Any] = {
    **PUBLISHED,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "logit_bias": {3: 1.0},
    "bad_words": ((5,), (1, 2)),
    "min_tokens": 3,
    "num_log_probs": 5,
}
MIXED = [GREEDY, PUBLISHED, EVERYTHING, {"temperature": 1.0}]


def counts_of(
    num_requests: int, params: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, *, fused: bool = True
) -> DeviceCounts:
    segments, logits, block = make_step(num_requests, params, gamma=GAMMA, vocab_size=VOCABULARY)
    operation = AcceptanceOperation(AcceptanceForm(VOCABULARY, GAMMA + 1))
    engine = DeviceAcceptance(operation, torch.device("cpu"), max_requests=num_requests)
    with DeviceCounts(monkeypatch) as counts:
        if fused:
            batch = accept_batch(segments, block, VOCABULARY, GAMMA)
            assert batch is not None
            results = results_of(segments, Decided(batch, engine.accept(batch, logits, block.draft_logits)()))
        else:
            results = accept(segments, logits, block)
    assert all(result.token_ids and result.error is None for result in results)
    if "bad_words" not in params[-1] and len(params) == 1:
        assert [result.num_accepted_drafts for result in results] == [GAMMA] * num_requests
    return counts


@pytest.mark.parametrize("num_requests", [1, 32])
@pytest.mark.parametrize(
    ("params", "num_operations"),
    [([GREEDY], 5), ([PUBLISHED], 11), ([{"temperature": 1.0}], 9), ([EVERYTHING], 15), (MIXED, 15)],
    ids=["greedy", "published", "plain sampling", "everything", "mixed"],
)
def test_a_step_takes_few_operations_and_one_wait(
    params: list[dict[str, Any]], num_operations: int, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counts_of(num_requests, params, monkeypatch)
    if len(params) == 1 or num_requests > 1:  # all of them are there
        assert counts.num_operations == num_operations, counts.names
    assert counts.num_operations <= 25
    assert counts.num_waits == 1
    assert counts.names["copy_"] == 2, "parameters go over in one copy, outcomes come back in one"


def test_the_slot_loop_takes_more_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter counts: what the runtime does by itself on a device's arrays, for a step of eight slots."""
    counts = counts_of(1, [PUBLISHED], monkeypatch, fused=False)
    assert counts.num_operations > 300
    assert counts.num_waits > 30
