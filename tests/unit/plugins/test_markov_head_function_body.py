"""The ONNX function body, run by ONNX Runtime, against the NumPy reference."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from dspark_trt_plugins.markov_head.form import LARGEST_LOGIT, MarkovHeadForm
from dspark_trt_plugins.markov_head.reference import markov_head
from onnx.inliner import inline_local_functions

from tests.support.markov_head_cases import (
    assert_draws_follow,
    function_model,
    random_inputs,
    random_weights,
    run_function,
    run_model,
)

MIXED_TEMPERATURES = [0.0, 0.7, 1.0, 0.0, 1e-5, 3.0]
HEADS = list(itertools.product(("vanilla", "gated", "rnn"), (0, 1, 5, 64)))
# (has_confidence_head, has_confidence_bias, is_confidence_with_markov)
CONFIDENCE_HEADS = [
    (True, True, True),
    (True, False, True),
    (True, True, False),
    (True, False, False),
    (False, False, False),
]


def assert_equals_reference(form: MarkovHeadForm, weights: dict, inputs: dict) -> None:
    expected = markov_head(form, weights, **inputs)
    found = run_function(form, weights, inputs)
    assert found.draft_ids.dtype == np.int64
    assert found.draft_logits.dtype == np.float32
    np.testing.assert_array_equal(found.draft_ids, expected.draft_ids)
    np.testing.assert_allclose(found.draft_logits, expected.draft_logits, atol=2e-5)
    if form.has_confidence_head:
        np.testing.assert_allclose(found.confidence_logits, expected.confidence_logits, atol=2e-5)
    else:
        assert found.confidence_logits is None


@pytest.mark.parametrize("vocab_size", [3, 128, 1000])
@pytest.mark.parametrize(("head_type", "rank"), HEADS)
def test_equals_the_reference_for_every_head_and_rank(head_type: str, rank: int, vocab_size: int) -> None:
    form = MarkovHeadForm(gamma=7, vocab_size=vocab_size, markov_rank=rank, head_type=head_type)  # type: ignore[arg-type]
    assert_equals_reference(form, random_weights(form, 24), random_inputs(form, 24, MIXED_TEMPERATURES))


@pytest.mark.parametrize("confidence_head", CONFIDENCE_HEADS)
@pytest.mark.parametrize("head_type", ["vanilla", "rnn"])
def test_equals_the_reference_for_every_confidence_head(head_type: str, confidence_head: tuple) -> None:
    form = MarkovHeadForm(3, 129, 8, head_type, *confidence_head)  # type: ignore[arg-type]
    assert_equals_reference(form, random_weights(form, 16), random_inputs(form, 16, MIXED_TEMPERATURES))


@pytest.mark.parametrize("temperatures", [[0.0], [1.0], [0.0] * 4, [0.6] * 4])
def test_equals_the_reference_for_one_kind_of_request_only(temperatures: list[float]) -> None:
    form = MarkovHeadForm(gamma=4, vocab_size=333, markov_rank=8)
    assert_equals_reference(form, random_weights(form, 16), random_inputs(form, 16, temperatures))


@pytest.mark.parametrize("vocab_size", [20, 300])
def test_non_finite_logits_never_yield_a_token_outside_the_vocabulary(vocab_size: int) -> None:
    form = MarkovHeadForm(gamma=5, vocab_size=vocab_size, markov_rank=4)
    weights, inputs = random_weights(form, 8), random_inputs(form, 8, MIXED_TEMPERATURES)
    base = inputs["base_logits"]
    base[:, 0, ::3] = np.nan
    base[:, 1, 1] = np.inf
    base[:, 2] = -np.inf
    base[:, 3] = np.nan
    base[:, 4, :2] = [np.inf, -np.inf]
    assert_equals_reference(form, weights, inputs)
    found = run_function(form, weights, inputs)
    assert ((found.draft_ids >= 0) & (found.draft_ids < vocab_size)).all()
    assert (np.abs(found.draft_logits) <= np.float32(LARGEST_LOGIT)).all()
    assert (found.draft_ids[:, 1] == 1).all()


@pytest.mark.parametrize("head_type", ["gated", "rnn"])
def test_non_finite_hidden_states_never_yield_a_token_outside_the_vocabulary(head_type: str) -> None:
    form = MarkovHeadForm(gamma=4, vocab_size=200, markov_rank=4, head_type=head_type)  # type: ignore[arg-type]
    inputs = random_inputs(form, 8, MIXED_TEMPERATURES)
    inputs["hidden"][:, 1, 3] = np.nan
    assert_equals_reference(form, random_weights(form, 8), inputs)


@pytest.mark.parametrize("vocab_size", [64, 256, 300])
def test_equal_largest_logits_give_the_lowest_id(vocab_size: int) -> None:
    form = MarkovHeadForm(gamma=3, vocab_size=vocab_size, markov_rank=0, has_confidence_head=False)
    inputs = random_inputs(form, 8, [0.0, 0.0])
    inputs["base_logits"][:, 0, 40:] = 50  # across blocks and inside one
    inputs["base_logits"][:, 1, [vocab_size - 1, 63]] = 50
    inputs["base_logits"][:, 2] = 1
    assert run_function(form, {}, inputs).draft_ids.tolist() == [[40, 63, 0]] * 2


@pytest.mark.parametrize("vocab_size", [32_001, 151_936])
def test_draws_of_a_large_vocabulary_keep_the_mass_of_the_tail(vocab_size: int) -> None:
    """Every drawn id covers its uniform in the float64 cumulative distribution to within 1e-6.

    A float32 running sum over so many entries is off by 6e-6 to 3e-5 of the whole.
    """
    form = MarkovHeadForm(gamma=4, vocab_size=vocab_size, markov_rank=0, has_confidence_head=False)
    inputs = random_inputs(form, 4, [1.0, 2.0, 0.5], spread=0.5)
    inputs["uniforms"][:, -1] = 1 - 2.0**-24
    found = run_function(form, {}, inputs)
    for request, slot in np.ndindex(3, 4):
        logits = found.draft_logits[request, slot].astype(np.float64)
        weights = np.exp((logits - logits.max()) / inputs["temperatures"][request])
        cumulative = np.append(0, weights.cumsum()) / weights.sum()
        uniform, token = inputs["uniforms"][request, slot], found.draft_ids[request, slot]
        assert cumulative[token] - 1e-6 <= uniform <= cumulative[token + 1] + 1e-6


def test_draws_follow_the_softmax_of_the_corrected_logits() -> None:
    """χ² over 60,000 second drafts of one first draft; false-failure probability 1e-6, and the seed is fixed."""
    form = MarkovHeadForm(gamma=2, vocab_size=150, markov_rank=3, has_confidence_head=False)
    count, temperature = 60_000, 0.8
    weights, inputs = random_weights(form, 4), random_inputs(form, 4, [temperature])
    inputs = {name: np.repeat(value, count, axis=0) for name, value in inputs.items()}
    inputs["uniforms"][:, 1] = np.random.default_rng(3).random(count, dtype=np.float32)
    found = run_function(form, weights, inputs)
    assert_draws_follow(found.draft_ids[:, 1], found.draft_logits[0, 1], temperature)


def test_the_model_passes_the_checker_and_names_what_a_tensorrt_plugin_reads() -> None:
    form = MarkovHeadForm(gamma=2, vocab_size=40, markov_rank=3)
    model = function_model(form, random_weights(form, 4), 4)
    onnx.checker.check_model(model, full_check=True)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in model.graph.node[0].attribute}
    assert attributes["plugin_namespace"] == b"dspark"
    assert attributes["plugin_version"] == b"1"
    assert (attributes["gamma"], attributes["vocab_size"], attributes["markov_rank"]) == (2, 40, 3)
    assert set(attributes) == set(model.functions[0].attribute)


@pytest.mark.parametrize("head_type", ["vanilla", "rnn"])
def test_the_body_can_be_inlined(head_type: str) -> None:
    """Compilers without functions see standard operators only."""
    form = MarkovHeadForm(gamma=3, vocab_size=200, markov_rank=4, head_type=head_type)  # type: ignore[arg-type]
    weights, inputs = random_weights(form, 8), random_inputs(form, 8, MIXED_TEMPERATURES)
    inlined = inline_local_functions(function_model(form, weights, 8))
    onnx.checker.check_model(inlined, full_check=True)
    assert not inlined.functions
    assert {node.domain for node in inlined.graph.node} == {""}
    np.testing.assert_array_equal(run_model(inlined, inputs)[0], markov_head(form, weights, **inputs).draft_ids)
