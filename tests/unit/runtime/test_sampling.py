"""The target distribution: against transformers' own processors, against a plain reference,
on numpy and torch alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark_trt.errors import RequestError
from dspark_trt.runtime.request import SamplingParams
from dspark_trt.runtime.sampling import LogitProcessors, draw, log_probs, residual_weights, target_probs
from tests.support.runtime_reference import next_token_probs

VOCAB_SIZE = 200
EOS = 7
LIBRARIES = {"numpy": np.array, "torch": lambda values: torch.from_numpy(np.array(values))}
to_library = pytest.mark.parametrize("to_library", LIBRARIES.values(), ids=LIBRARIES)


def random_logits(seed: int, rows: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=3, size=(rows, VOCAB_SIZE)).astype(np.float32)


def edited(logits: Any, params: SamplingParams, prompt: list[int], generated: list[int]) -> Any:
    processors = LogitProcessors(params, np.array(prompt, dtype=np.int64), [EOS])
    for token in generated:
        processors.push(token)
    if processors.has_edits:
        for row in range(len(logits)):
            processors.edit(logits[row, :])
    return logits


@to_library
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.8, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 1.0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "bad_words": ((5,), (3, 4), (1, 2, 3))},
        {"temperature": 0.9, "min_tokens": 5},
        {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 0.8, "bad_words": ((1, 9),), "min_tokens": 9},
    ],
)
def test_probabilities_equal_those_of_transformers(to_library: Any, settings: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **settings})
    prompt, generated = [1, 2, 3, 3, 50], [3, 9, 1]
    processors: list[Any] = []
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_words:
        processors.append(NoBadWordsLogitsProcessor([list(words) for words in params.bad_words]))
    if params.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, [EOS]))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    for seed in range(5):
        logits = random_logits(seed)
        scores = LogitsProcessorList(processors)(
            torch.tensor([prompt + generated] * len(logits)), torch.from_numpy(logits.copy())
        )
        expected = torch.softmax(scores, dim=-1).numpy()
        found = target_probs(edited(to_library(logits), params, prompt, generated), [params] * len(logits))
        assert (np.asarray(found) > 0).tolist() == (expected > 0).tolist()
        np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-5, atol=1e-8)


@to_library
def test_penalties_and_biases_of_openai_follow_the_plain_reference(to_library: Any) -> None:
    params = SamplingParams(
        temperature=0.9,
        top_p=0.97,
        repetition_penalty=1.2,
        presence_penalty=0.7,
        frequency_penalty=-0.4,
        logit_bias={3: 2.5, 9: -100.0, 150: 1.0},
        min_tokens=4,
    )
    prompt, generated = [1, 2, 3], [3, 4, 4]
    logits = random_logits(11)
    found = np.asarray(target_probs(edited(to_library(logits), params, prompt, generated), [params] * 3))
    for row in range(3):
        expected = next_token_probs(logits[row], prompt, generated, params, [EOS])
        np.testing.assert_allclose(found[row], expected, rtol=2e-5, atol=1e-8)
    assert (found[:, [9, EOS]] == 0).all()


@to_library
def test_rows_of_one_call_keep_their_own_settings(to_library: Any) -> None:
    each = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.5),
    ]
    logits = random_logits(5)
    together = np.asarray(target_probs(to_library(logits), each))
    for row, params in enumerate(each):
        alone = np.asarray(target_probs(to_library(logits[row : row + 1]), [params]))
        assert (together[row] == alone[0]).all()


@to_library
def test_greedy_is_the_point_mass_of_the_first_largest_logit(to_library: Any) -> None:
    logits = np.zeros((1, VOCAB_SIZE), dtype=np.float32)
    logits[0, [20, 30]] = 2.0
    for temperature in (0.0, 9e-6):
        probs = np.asarray(target_probs(to_library(logits), [SamplingParams(temperature=temperature)]))
        assert np.flatnonzero(probs[0]).tolist() == [20]
        assert probs[0, 20] == 1.0


@to_library
def test_top_p_cuts_ties_by_token_id_and_top_k_keeps_them(to_library: Any) -> None:
    logits = np.zeros((1, 8), dtype=np.float32)
    half = np.asarray(target_probs(to_library(logits), [SamplingParams(temperature=1.0, top_p=0.5)]))
    assert np.flatnonzero(half[0]).tolist() == [0, 1, 2, 3]
    kept = np.asarray(target_probs(to_library(logits), [SamplingParams(temperature=1.0, top_k=2)]))
    assert np.flatnonzero(kept[0]).tolist() == list(range(8))


@pytest.mark.parametrize("seed", range(20))
def test_many_rows_at_once_are_cut_as_single_rows_are(seed: int) -> None:
    """Logits in steps of a half: ties at every border. A device cuts all rows in one go, a host one after the other."""
    random = np.random.default_rng(seed)
    logits = np.round(random_logits(seed, rows=8) * 2) / 2
    params = [
        SamplingParams(
            temperature=float(random.choice([0.0, 0.6, 1.5])),
            top_k=int(random.choice([0, 1, 3, 20])),
            top_p=float(random.choice([1.0, 0.9, 0.5, 1e-6])),
            min_p=float(random.choice([0.0, 0.1, 1.0])),
        )
        for _ in logits
    ]
    on_host, on_device = (np.asarray(target_probs(library(logits), params)) for library in LIBRARIES.values())
    assert ((on_host > 0) == (on_device > 0)).all()
    np.testing.assert_allclose(on_device, on_host, rtol=1e-6)
    for row, each in enumerate(params):
        alone = np.asarray(target_probs(torch.from_numpy(logits[row : row + 1]), [each]))
        np.testing.assert_array_equal(on_device[row], alone[0])


@to_library
def test_the_most_probable_token_always_stays(to_library: Any) -> None:
    params = SamplingParams(temperature=1.0, top_k=1, top_p=1e-9, min_p=1.0)
    logits = random_logits(3)
    probs = np.asarray(target_probs(to_library(logits), [params] * 3))
    assert probs.argmax(axis=1).tolist() == logits.argmax(axis=1).tolist()
    assert (probs.max(axis=1) == 1.0).all()


@to_library
@pytest.mark.parametrize("top_p", [1e-9, 1e-300])
def test_tiny_top_p_keeps_one_token_where_all_are_equal(to_library: Any, top_p: float) -> None:
    logits = to_library(np.zeros((1, 97), dtype=np.float32))
    probs = np.asarray(target_probs(logits, [SamplingParams(temperature=1.0, top_p=top_p)]))
    assert np.flatnonzero(probs[0]).tolist() == [0]


@to_library
def test_masking_every_token_is_the_requests_error(to_library: Any) -> None:
    params = SamplingParams(temperature=1.0, bad_words=tuple((token,) for token in range(VOCAB_SIZE)))
    with pytest.raises(RequestError, match="mask every token"):
        edited(to_library(random_logits(0)), params, [1], [])


@to_library
def test_draws_follow_the_weights_and_never_leave_the_support(to_library: Any) -> None:
    weights = np.array([[0.0, 3.0, 0.0, 1.0, 0.0]] * 4, dtype=np.float32)
    top = 1.0 - 2.0**-52
    assert draw(to_library(weights), [0.0, 0.7499, 0.7501, top]) == [1, 1, 3, 3]


@to_library
def test_the_residual_is_what_the_drafter_undershoots(to_library: Any) -> None:
    target = np.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], dtype=np.float32)
    draft = np.array([[0.2, 0.6, 0.2], [0.2, 0.3, 0.5]], dtype=np.float32)
    found = np.asarray(residual_weights(to_library(target), to_library(draft)))
    np.testing.assert_allclose(found[0], [0.3, 0.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(found[1], target[1])  # nothing is left of it: p_t itself


@to_library
def test_log_probs_are_the_raw_log_softmax(to_library: Any) -> None:
    logits = random_logits(2, rows=1)[0]
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    value, top = log_probs(to_library(logits), 17, 5)
    assert value == pytest.approx(expected[17], abs=1e-5)
    assert [token for token, _ in top] == np.argsort(-expected)[:5].tolist()
    assert [log_prob for _, log_prob in top] == pytest.approx(np.sort(expected)[::-1][:5].tolist(), abs=1e-5)
    assert log_probs(to_library(logits), 17, 0)[1] == ()


@to_library
def test_top_log_probs_list_ties_by_token_id(to_library: Any) -> None:
    logits = np.array([0.0, 1.0, 1.0, 1.0, 0.0], dtype=np.float32)
    assert [token for token, _ in log_probs(to_library(logits), 0, 2)[1]] == [1, 2]
    assert [token for token, _ in log_probs(to_library(logits), 0, 9)[1]] == [1, 2, 3, 0, 4]


def test_a_float32_row_of_a_large_vocabulary_sums_to_one() -> None:
    logits = np.random.default_rng(0).normal(scale=2, size=(1, 49152)).astype(np.float32)
    probs = target_probs(logits, [SamplingParams(temperature=1.0)])
    assert float(probs.astype(np.float64).sum()) == pytest.approx(1.0, abs=1e-6)
