"""The device runtime over PyTorch sessions, on the CPU: everything of it but streams, pinned memory and CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dspark_trt.contract.protocol import DraftBatch, IngestBatch
from dspark_trt.engines.device.engines import DeviceEngines
from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.reference.engines import open_reference_engines
from dspark_trt.reference.on_device import DevicePrecision, open_device_reference_engines
from tests.support.conversations import Conversations
from tests.support.device_cases import (
    HEADS,
    LIMITS,
    SMALL_VOCABULARY,
    VOCABULARY,
    Pair,
    check_distribution,
    check_greedy,
    device_loop,
    greedy_requests,
    make_pair,
    oracle_tokens,
    schedulers,
    to_numpy,
    tokens_of,
)

TOLERANCE = 1e-4


def open_on_cpu(pair: Pair, precision: DevicePrecision = "fp32") -> DeviceEngines:
    return open_device_reference_engines(pair.target, pair.drafter, limits=LIMITS, precision=precision, device="cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> dict[str, list[int]]:
    return oracle_tokens(pair, greedy_requests())


@pytest.mark.parametrize("head", HEADS)
def test_ragged_steps_give_what_the_oracle_gives(head: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, drafter=HEADS[head])
    engines = open_on_cpu(pair)
    target, drafter = open_reference_engines(pair.target, pair.drafter, limits=LIMITS)
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=VOCABULARY, seed=3)
    random = np.random.default_rng(4)
    for _ in range(6):
        step = rows.random_step(max_query=6)
        found, wanted = engines.target.forward(step.batch), target.forward(step.batch)
        np.testing.assert_allclose(to_numpy(found.logits), wanted.logits, atol=TOLERANCE)
        np.testing.assert_allclose(to_numpy(found.taps), wanted.taps, atol=TOLERANCE)
        batch = step.batch
        ingested = IngestBatch(found.taps, batch.rows, batch.past_lengths, batch.query_lengths)
        engines.drafter.ingest(ingested)
        drafter.ingest(ingested)
        rows.commit(step, step.batch.query_lengths.tolist())
        order = random.permutation(batch.rows)
        drafts = DraftBatch(
            order,
            random.integers(0, VOCABULARY, len(order)),
            np.array([len(rows.tokens[row]) for row in order]),
            random.choice([0.0, 0.7], len(order)).astype(np.float32),
            random.random((len(order), pair.gamma), np.float32),
        )
        drafted, expected = engines.drafter.draft(drafts), drafter.draft(drafts)
        assert drafted.draft_ids.tolist() == expected.draft_ids.tolist()
        np.testing.assert_allclose(to_numpy(drafted.draft_logits), expected.draft_logits, atol=TOLERANCE)
        if expected.confidence_logits is not None:
            np.testing.assert_allclose(to_numpy(drafted.confidence_logits), expected.confidence_logits, atol=TOLERANCE)


@pytest.mark.parametrize("name", schedulers(gamma=5))
def test_greedy_output_is_the_targets_at_every_verify_length(
    name: str, pair: Pair, expected: dict[str, list[int]]
) -> None:
    check_greedy(open_on_cpu(pair), pair, schedulers(pair.gamma)[name], expected)


@pytest.mark.parametrize("mode", ["early_stop", "lagged_budget"])
@pytest.mark.parametrize("head", ["gated", "rnn", "no head, no confidence"])
def test_greedy_output_is_the_targets_with_every_kind_of_drafter(mode: str, head: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, drafter=HEADS[head])
    check_greedy(open_on_cpu(pair), pair, schedulers(pair.gamma)[mode], oracle_tokens(pair, greedy_requests()))


@pytest.mark.parametrize("mode", ["off", "fixed 2", "lagged_budget"])
def test_sampled_output_is_distributed_as_the_target_says(mode: str, tmp_path: Path) -> None:
    """The false-failure probability is in `check_distribution`."""
    pair = make_pair(tmp_path, target={"vocab_size": SMALL_VOCABULARY, "layers": 3}, drafter={"gamma": 2})
    check_distribution(open_on_cpu(pair), pair, schedulers(pair.gamma)[mode], num_samples=600)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_engines_decode_as_many_tokens(precision: DevicePrecision, pair: Pair) -> None:
    """Their greedy tokens are their own, close as two logits may be in 16 bits; lengths and finite outputs are not."""
    engines = open_on_cpu(pair, precision)
    assert engines.target.cache.layers[0].dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    loop = device_loop(engines, schedulers(pair.gamma)["lagged_budget"])
    outputs = tokens_of(loop, greedy_requests())
    assert [len(outputs[r.request_id]) for r in greedy_requests()] == [r.sampling.max_tokens for r in greedy_requests()]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_weight_is_read_in_a_call(precision: DevicePrecision, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call may be one that is about to be captured;
    and memory that is not there is missed when engines open."""
    engines = open_on_cpu(pair, precision)
    monkeypatch.setattr(type(pair.target.weights), "array", lambda store, name: pytest.fail(f"{name} is read"))
    tokens_of(device_loop(engines, schedulers(pair.gamma)["fixed 2"]), greedy_requests(max_tokens=8))


def test_a_device_that_is_not_there_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentMissingError, match=r"device cuda: PyTorch .* sees no CUDA GPU; install"):
        open_device_reference_engines(pair.target, pair.drafter, limits=LIMITS, precision="bf16", device="cuda")
