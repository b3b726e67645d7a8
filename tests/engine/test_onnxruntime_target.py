"""The ONNX Runtime target engine against transformers: logits, taps, ragged steps, rollback, rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_trt.contract.dims import Attention
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits, TargetBatch
from dspark_trt.errors import CapacityError
from tests.support.conversations import Conversations, TransformersTarget, expected_outputs, open_target
from tests.support.factories import write_target

LIMITS = EngineLimits(max_requests=5, max_seq_len=128, max_batch_tokens=64)
TOLERANCE = 1e-4
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tied": True},
    "llama biases": {"biases": True},
    "llama one KV head": {"kv_heads": 1},
    "llama no grouping": {"kv_heads": 4},
    "llama linear": {"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama llama3": {"rope": LLAMA3},
    "llama bfloat16 in shards": {"dtype": "bfloat16", "shards": 3},
    "llama float16": {"dtype": "float16"},
    "llama head_dim 12, which falls back": {"head_dim": 12},
    "qwen3": {"family": "qwen3"},
    "qwen3 tied, biases": {"family": "qwen3", "tied": True, "biases": True},
    "qwen3 yarn": {"family": "qwen3", "rope": YARN},
    "qwen3 wide heads": {"family": "qwen3", "head_dim": 32},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_transformers_over_ragged_steps_with_rejections(case: str, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", **CASES[case])
    taps = (-1, 0, 2, 3)  # the embedding output and, raw, the last layer's output among them
    engine = open_target(folder, tmp_path / "graphs", taps=taps, limits=LIMITS)
    model = TransformersTarget(folder)
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97, seed=sum(case.encode()))
    for _ in range(6):
        step = rows.random_step(max_query=9)
        output = engine.forward(step.batch)
        logits, tap_values = expected_outputs(model, step, taps)
        np.testing.assert_allclose(output.logits, logits, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(output.taps, tap_values, atol=TOLERANCE, rtol=0)
        rows.commit(step, rows.random_acceptance(step))


@pytest.mark.parametrize("attention", ["gqa", "standard"])
def test_the_last_tap_behind_the_norm_is_what_hidden_states_of_transformers_hold(
    attention: Attention, tmp_path: Path
) -> None:
    folder = write_target(tmp_path / "target", family="qwen3")
    options: dict[str, Any] = {"taps": (-1, 1, 3), "limits": LIMITS, "attention": attention}
    engine = open_target(folder, tmp_path / "normed", norm_last_tap=True, **options)
    raw = open_target(folder, tmp_path / "raw", **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    step = Conversations(num_rows=1, vocab_size=97).step([0], [12], num_decode=0)
    with torch.no_grad():
        states = model(torch.from_numpy(step.batch.token_ids)[None], output_hidden_states=True).hidden_states
    expected = np.concatenate([states[layer + 1][0].numpy() for layer in (-1, 1, 3)], axis=1)
    output = engine.forward(step.batch)
    np.testing.assert_allclose(output.taps, expected, atol=TOLERANCE, rtol=0)
    logits = output.logits.copy()
    unnormed = raw.forward(step.batch)
    np.testing.assert_array_equal(unnormed.logits, logits)
    assert np.abs(unnormed.taps[:, -32:] - expected[:, -32:]).max() > 0.1


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), family="qwen3")


@pytest.fixture(scope="module")
def model(target_folder: Path) -> TransformersTarget:
    return TransformersTarget(target_folder)


@pytest.fixture
def engine(target_folder: Path, tmp_path: Path) -> Any:
    return open_target(target_folder, tmp_path, taps=(1,), limits=LIMITS)


def test_prefill_chunks_share_a_step_with_decoding_rows(engine: Any, model: TransformersTarget) -> None:
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    for row in (1, 4):
        first = rows.step([row], [7], num_decode=0)
        engine.forward(first.batch)
        rows.commit(first, [7])
    for chunk in (20, 20, 3):  # row 2 prefills in three chunks while rows 4 and 1 decode
        step = rows.step([4, 1, 2], [3, 1, chunk], num_decode=2)
        output = engine.forward(step.batch)
        np.testing.assert_allclose(output.logits, expected_outputs(model, step, (1,))[0], atol=TOLERANCE, rtol=0)
        rows.commit(step, [2, 1, chunk])


def test_padded_calls_give_the_same(engine: Any, model: TransformersTarget) -> None:
    """Prompt chunks beside rows that decode, up to the limit of a call."""
    engine.pad_calls(lambda num_requests, num_tokens: num_tokens + num_requests)
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    for at, lengths, num_decode in (([1, 3], [5, 3], 0), ([3, 1, 0], [2, 1, 30], 2), ([1, 0, 2], [1, 1, 62], 2)):
        step = rows.step(at, lengths, num_decode=num_decode)
        output = engine.forward(step.batch)
        assert len(output.taps) == len(step.batch.token_ids)
        logits, taps = expected_outputs(model, step, (1,))
        np.testing.assert_allclose(output.logits, logits, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(output.taps, taps, atol=TOLERANCE, rtol=0)
        rows.commit(step, lengths)


def test_rows_without_tokens_keep_their_cache(engine: Any, model: TransformersTarget) -> None:
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    first = rows.step([0, 1, 2, 3, 4], [6, 5, 4, 3, 2], num_decode=0)
    engine.forward(first.batch)
    rows.commit(first, [6, 5, 4, 3, 2])
    for group in ([0, 4], [4, 0]):  # rows 1..3 lie idle inside the range
        between = rows.step(group, [8, 2], num_decode=1)
        engine.forward(between.batch)
        rows.commit(between, [8, 2])
    step = rows.step([2, 3, 1], [2, 2, 2], num_decode=3)
    output = engine.forward(step.batch)
    np.testing.assert_allclose(output.logits, expected_outputs(model, step, (1,))[0], atol=TOLERANCE, rtol=0)


def test_moved_rows_go_on_where_they_were(engine: Any, model: TransformersTarget) -> None:
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    first = rows.step([0, 3], [4, 11], num_decode=0)
    engine.forward(first.batch)
    rows.commit(first, [4, 11])
    engine.move_row(3, 1, 11)
    rows.tokens[1], rows.tokens[3] = rows.tokens[3], []
    step = rows.step([1, 0, 3], [3, 1, 5], num_decode=2)
    output = engine.forward(step.batch)
    np.testing.assert_allclose(output.logits, expected_outputs(model, step, (1,))[0], atol=TOLERANCE, rtol=0)


def test_only_the_logit_rows_asked_for_come_back_and_tap_rows_are_all_tokens(engine: Any) -> None:
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    step = rows.step([0, 1, 2], [2, 4, 9], num_decode=2)
    every = engine.forward(step.batch)
    logits, taps = every.logits.copy(), every.taps.copy()
    wanted = np.array([0, 3, 14])
    some = engine.forward(TargetBatch(**{**_fields(step.batch), "logit_rows": wanted}))
    assert some.logits.shape == (3, 97)
    np.testing.assert_allclose(some.logits, logits[wanted], atol=1e-6, rtol=0)
    np.testing.assert_array_equal(some.taps, taps)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_prompt_chunk_with_more_to_come_asks_for_no_logits(
    target_folder: Path, tmp_path: Path, precision: Precision
) -> None:
    engine = open_target(target_folder, tmp_path, taps=(1,), limits=LIMITS, precision=precision)
    step = Conversations(num_rows=2, vocab_size=97).step([0], [5], num_decode=0)
    none = TargetBatch(**{**_fields(step.batch), "logit_rows": np.empty(0, np.int64)})
    taps = engine.forward(step.batch).taps.copy()
    output = engine.forward(none)
    assert output.logits.shape == (0, 97)
    np.testing.assert_array_equal(output.taps, taps)


def test_without_tap_layers_taps_are_empty(target_folder: Path, tmp_path: Path) -> None:
    engine = open_target(target_folder, tmp_path, limits=LIMITS)
    step = Conversations(num_rows=2, vocab_size=97).step([0], [3], num_decode=0)
    assert engine.forward(step.batch).taps.shape == (3, 0)


def test_a_row_fills_to_its_last_position_beside_a_long_chunk(engine: Any, model: TransformersTarget) -> None:
    """Padded to its neighbour's length, the query of the full row reaches far behind max_seq_len."""
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    for length in (63, 63):
        step = rows.step([0], [length], num_decode=0)
        engine.forward(step.batch)
        rows.commit(step, [length])
    step = rows.step([0, 1], [2, 62], num_decode=0)
    output = engine.forward(step.batch)
    np.testing.assert_allclose(output.logits, expected_outputs(model, step, (1,))[0], atol=TOLERANCE, rtol=0)
    rows.commit(step, [2, 62])
    assert len(rows.tokens[0]) == LIMITS.max_seq_len
    with pytest.raises(CapacityError, match="129 positions, max_seq_len is 128"):
        engine.forward(rows.step([0], [1], num_decode=1).batch)


def test_calls_beyond_the_limits_are_refused(engine: Any) -> None:
    rows = Conversations(num_rows=9, vocab_size=97)
    with pytest.raises(CapacityError, match="65 packed tokens exceeds max_batch_tokens 64"):
        engine.forward(rows.step([0, 1], [60, 5], num_decode=0).batch)
    with pytest.raises(CapacityError, match="max_requests 5"):
        engine.forward(rows.step([5], [1], num_decode=1).batch)


def test_one_token_steps_and_one_long_step_agree(engine: Any) -> None:
    """Greedy output is stable across verify lengths only because these logits are nearly equal."""
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    prompt = rows.step([0], [9], num_decode=0)
    engine.forward(prompt.batch)
    rows.commit(prompt, [9])
    block = rows.step([0], [8], num_decode=1)
    together = engine.forward(block.batch).logits.copy()
    for index in range(8):
        token = block.batch.token_ids[index : index + 1]
        alone = engine.forward(
            TargetBatch(token, np.array([0]), np.array([9 + index]), np.array([1]), 1, np.array([0]))
        )
        assert np.abs(alone.logits[0] - together[index]).max() < 1e-4


def test_a_request_alone_and_in_a_ragged_batch_agrees(engine: Any) -> None:
    rows = Conversations(num_rows=LIMITS.max_requests, vocab_size=97)
    step = rows.step([0, 3, 2, 1], [3, 8, 1, 30], num_decode=3)
    together = engine.forward(step.batch).logits[:3].copy()
    alone = TargetBatch(step.batch.token_ids[:3], np.array([4]), np.array([0]), np.array([3]), 1, np.arange(3))
    np.testing.assert_allclose(engine.forward(alone).logits, together, atol=1e-4, rtol=0)


def _fields(batch: TargetBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in TargetBatch.__slots__}
