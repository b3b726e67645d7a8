"""The Triton kernels of MarkovHead, under Triton's CPU interpreter, against the NumPy reference.

Every tensor stands in a larger allocation full of NaN (integers: far outside every tensor), and nothing outside may
change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt_plugins.markov_head.form import EXCLUDED_LOGIT, LARGEST_LOGIT, MarkovHeadForm
from dspark_trt_plugins.markov_head.launches import MarkovHeadOperation
from dspark_trt_plugins.markov_head.reference import candidates, markov_head

from tests.support.interpreted_kernels import run_interpreted
from tests.support.markov_head_cases import Arrays, random_inputs, random_weights, run_function

HIDDEN = 24
MIXED_TEMPERATURES = [0.0, 0.7, 1.0, 0.0, 1e-5, 3.0]
# (markov_rank, head_type): without a head the type means nothing
HEADS: list[tuple[int, Any]] = [(0, "vanilla")] + [(r, t) for r in (1, 5, 64) for t in ("vanilla", "gated", "rnn")]


def head_form(vocab_size: int, rank: int, head_type: Any = "vanilla", gamma: int = 3, **changes: Any) -> MarkovHeadForm:
    return MarkovHeadForm(gamma, vocab_size, rank, head_type, hidden_size=HIDDEN, **changes)


def rounded(form: MarkovHeadForm, arrays: Arrays) -> Arrays:
    """Float values as the form's element types hold them."""
    types = {tensor.name: getattr(torch, tensor.element_type) for tensor in MarkovHeadOperation(form).inputs}
    return {
        name: torch.from_numpy(value).to(types[name]).to(torch.float64).numpy() if value.dtype.kind == "f" else value
        for name, value in arrays.items()
    }


def assert_kernel_equals_reference(
    form: MarkovHeadForm, weights: Arrays, inputs: Arrays, tolerance: float = 2e-5
) -> dict[str, np.ndarray]:
    found = run_interpreted(MarkovHeadOperation(form), {**inputs, **weights})
    expected = markov_head(form, rounded(form, weights), **rounded(form, inputs))  # type: ignore[arg-type]
    np.testing.assert_array_equal(found["draft_ids"], expected.draft_ids)
    np.testing.assert_allclose(found["draft_logits"], expected.draft_logits, atol=tolerance, rtol=1e-6)
    if form.has_confidence_head:
        np.testing.assert_allclose(found["confidence_logits"], expected.confidence_logits, atol=tolerance)
    return found


@pytest.mark.parametrize("vocab_size", [1000, 4099])
@pytest.mark.parametrize(("rank", "head_type"), HEADS)
def test_kernels_equal_the_reference_for_every_head_and_rank(rank: int, head_type: Any, vocab_size: int) -> None:
    form = head_form(vocab_size, rank, head_type)
    weights, inputs = random_weights(form, HIDDEN), random_inputs(form, HIDDEN, MIXED_TEMPERATURES)
    assert_kernel_equals_reference(form, weights, inputs)


@pytest.mark.parametrize("logits_type", ["float32", "same"])
@pytest.mark.parametrize("weight_type", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
def test_16_bit_weights_give_the_products_of_their_exact_values(
    head_type: Any, weight_type: Any, logits_type: str
) -> None:
    """Features meet 16-bit weights in two 16-bit parts: one bfloat16 part alone would be off by 3e-2 here.

    The interpreter cuts float32 to bfloat16 where a GPU rounds.
    """
    types = {"weight_type": weight_type, "logits_type": weight_type if logits_type == "same" else "float32"}
    form = head_form(1000, 64, head_type, **types)
    weights, inputs = random_weights(form, HIDDEN), random_inputs(form, HIDDEN, MIXED_TEMPERATURES)
    assert_kernel_equals_reference(form, weights, inputs, tolerance=3e-4)


@pytest.mark.parametrize("num_requests", [1, 16, 17, 70])
@pytest.mark.parametrize("head_type", ["vanilla", "rnn"])
def test_kernels_equal_the_reference_for_any_number_of_requests(head_type: Any, num_requests: int) -> None:
    form = head_form(200, 20, head_type, gamma=2)
    temperatures = [MIXED_TEMPERATURES[index % 6] for index in range(num_requests)]
    assert_kernel_equals_reference(form, random_weights(form, HIDDEN), random_inputs(form, HIDDEN, temperatures))


@pytest.mark.parametrize("confidence_head", [(True, False, True), (True, True, False), (False, False, False)])
def test_kernels_equal_the_reference_for_every_confidence_head(confidence_head: tuple[bool, bool, bool]) -> None:
    form = MarkovHeadForm(2, 200, 8, "gated", *confidence_head, hidden_size=HIDDEN)
    inputs = random_inputs(form, HIDDEN, MIXED_TEMPERATURES)
    assert_kernel_equals_reference(form, random_weights(form, HIDDEN), inputs)


@pytest.mark.parametrize("top_n", [0, 65])
@pytest.mark.parametrize("rank", [0, 4])
def test_non_finite_logits_never_yield_a_token_outside_the_vocabulary(rank: int, top_n: int) -> None:
    form = head_form(300, rank, gamma=5, top_n=top_n)
    weights, inputs = random_weights(form, HIDDEN), random_inputs(form, HIDDEN, MIXED_TEMPERATURES)
    base = inputs["base_logits"]
    base[:, 0, ::3] = np.nan
    base[:, 1, 1] = np.inf
    base[:, 2] = -np.inf
    base[:, 3] = np.nan
    base[:, 4, :2] = [np.inf, -np.inf]
    found = assert_kernel_equals_reference(form, weights, inputs)
    assert ((found["draft_ids"] >= 0) & (found["draft_ids"] < 300)).all()
    assert np.isfinite(found["draft_logits"]).all()
    assert (found["draft_ids"][:, 1] == 1).all()


@pytest.mark.parametrize("top_n", [0, 40])
@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
def test_an_anchor_that_is_no_token_is_the_nearest_one(head_type: Any, top_n: int) -> None:
    """It would be read outside of W1, which a GPU does not notice."""
    form = head_form(300, 20, head_type, top_n=top_n)
    weights, inputs = random_weights(form, HIDDEN), random_inputs(form, HIDDEN, [0.0, 0.7, 1.0, 0.0])
    inputs["anchor_ids"] = np.array([-1, 300, 2**40, -(2**40)])
    found = assert_kernel_equals_reference(form, weights, inputs)
    inputs["anchor_ids"] = np.array([0, 299, 299, 0])
    near = run_interpreted(MarkovHeadOperation(form), {**inputs, **weights})
    assert found["draft_ids"].tolist() == near["draft_ids"].tolist()
    inputs["anchor_ids"] = np.array([-1, 300, 2**40, -(2**40)])
    assert run_function(form, weights, inputs).draft_ids.tolist() == near["draft_ids"].tolist()


@pytest.mark.parametrize("head_type", ["gated", "rnn"])
def test_non_finite_hidden_states_and_weights_never_yield_a_token_outside_the_vocabulary(head_type: Any) -> None:
    form = head_form(200, 4, head_type, gamma=4, weight_type="bfloat16")
    weights, inputs = random_weights(form, HIDDEN), random_inputs(form, HIDDEN, MIXED_TEMPERATURES)
    inputs["hidden"][:, 1, 3] = np.nan
    weights["markov_head.markov_w2.weight"][:3, 1] = [np.nan, np.inf, -np.inf]
    found = run_interpreted(MarkovHeadOperation(form), {**inputs, **weights})
    assert ((found["draft_ids"] >= 0) & (found["draft_ids"] < 200)).all()
    assert (np.abs(found["draft_logits"]) <= np.float32(LARGEST_LOGIT)).all()


@pytest.mark.parametrize("vocab_size", [300, 1000])
def test_equal_largest_logits_give_the_lowest_id(vocab_size: int) -> None:
    form = head_form(vocab_size, 0, has_confidence_head=False)
    inputs = random_inputs(form, HIDDEN, [0.0, 0.0])
    inputs["base_logits"][:, 0, 140:] = 50  # inside a tile and across tiles
    inputs["base_logits"][:, 1, [vocab_size - 1, 163]] = 50
    inputs["base_logits"][:, 2] = 1
    found = run_interpreted(MarkovHeadOperation(form), inputs)
    assert found["draft_ids"].tolist() == [[140, 163, 0]] * 2


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-24])
def test_extreme_uniforms_draw_the_first_and_the_last_token_that_has_a_probability(uniform: float) -> None:
    form = head_form(1000, 0, gamma=2, has_confidence_head=False)
    inputs = random_inputs(form, HIDDEN, [1.0])
    inputs["base_logits"][:] = -1e30
    inputs["base_logits"][:, :, 200:700] = 0.0
    inputs["uniforms"][:] = uniform
    found = run_interpreted(MarkovHeadOperation(form), inputs)
    assert found["draft_ids"].tolist() == [[200, 200] if uniform == 0 else [699, 699]]


@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_every_drawn_id_covers_its_uniform_in_the_exact_cumulative_distribution(spread: float) -> None:
    form = head_form(4099, 0, gamma=1, has_confidence_head=False)
    inputs = random_inputs(form, HIDDEN, [0.5, 1.0, 2.0] * 16, spread=spread)
    found = run_interpreted(MarkovHeadOperation(form), inputs)
    for request, temperature in enumerate(inputs["temperatures"]):
        logits = found["draft_logits"][request, 0].astype(np.float64)
        weights = np.exp((logits - logits.max()) / temperature)
        cumulative = np.append(0, weights.cumsum()) / weights.sum()
        uniform, token = inputs["uniforms"][request, 0], found["draft_ids"][request, 0]
        assert cumulative[token] - 1e-6 <= uniform <= cumulative[token + 1] + 1e-6


def test_the_same_inputs_give_the_same_bits() -> None:
    form = head_form(1000, 5, "rnn")
    arrays = {**random_inputs(form, HIDDEN, MIXED_TEMPERATURES), **random_weights(form, HIDDEN)}
    first, second = (run_interpreted(MarkovHeadOperation(form), arrays) for _ in range(2))
    for name, value in first.items():
        assert value.tobytes() == second[name].tobytes()


@pytest.mark.parametrize("top_n", [1, 5, 64, 300])
@pytest.mark.parametrize(("rank", "head_type"), [(0, "vanilla"), (5, "vanilla"), (20, "gated"), (20, "rnn")])
def test_top_n_restricts_every_slot_to_its_largest_base_logits(rank: int, head_type: Any, top_n: int) -> None:
    form = head_form(1000, rank, head_type, top_n=top_n)
    weights, inputs = random_weights(form, HIDDEN), random_inputs(form, HIDDEN, MIXED_TEMPERATURES)
    inputs["base_logits"] = np.round(inputs["base_logits"])  # equal ones at the edge of the support
    found = assert_kernel_equals_reference(form, weights, inputs)
    is_candidate = candidates(inputs["base_logits"], top_n)
    assert (is_candidate.sum(axis=-1) == top_n).all()
    assert (found["draft_logits"][~is_candidate] == np.float32(EXCLUDED_LOGIT)).all()
    assert (found["draft_logits"][is_candidate] > np.float32(-LARGEST_LOGIT)).all()
    assert np.take_along_axis(is_candidate, found["draft_ids"][:, :, None], axis=-1).all()


def test_top_n_takes_equal_logits_by_lowest_id_and_counts_both_zeros_as_equal() -> None:
    form = head_form(600, 0, gamma=1, top_n=3, has_confidence_head=False)
    inputs = random_inputs(form, HIDDEN, [1.0, 1.0])
    inputs["base_logits"][:] = -1
    inputs["base_logits"][0, 0, [3, 299, 300, 599]] = [-0.0, 0.0, -0.0, 0.0]
    inputs["base_logits"][1, 0, [70, 500]] = [np.nan, 5]
    found = run_interpreted(MarkovHeadOperation(form), inputs)["draft_logits"]
    excluded = np.float32(EXCLUDED_LOGIT)
    assert np.flatnonzero(found[0, 0] != excluded).tolist() == [3, 299, 300]
    assert np.flatnonzero(found[1, 0] != excluded).tolist() == [0, 1, 500]


@pytest.mark.parametrize("top_n", [0, 40])
@pytest.mark.parametrize(("rank", "head_type"), [(0, "vanilla"), (5, "vanilla"), (20, "gated"), (20, "rnn")])
def test_kernel_reference_and_function_body_draft_the_same(rank: int, head_type: Any, top_n: int) -> None:
    form = head_form(1000, rank, head_type, top_n=top_n)
    weights, inputs = random_weights(form, HIDDEN, seed=4), random_inputs(form, HIDDEN, MIXED_TEMPERATURES, seed=4)
    found = assert_kernel_equals_reference(form, weights, inputs)
    body = run_function(form, weights, inputs)
    np.testing.assert_array_equal(body.draft_ids, found["draft_ids"])
    np.testing.assert_allclose(body.draft_logits, found["draft_logits"], atol=2e-5, rtol=1e-6)
    np.testing.assert_allclose(body.confidence_logits, found["confidence_logits"], atol=2e-5)


def test_forms_that_cannot_be_computed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"top_n: expected 0 .* to 99, found 100"):
        head_form(100, 4, top_n=100)
    with pytest.raises(ValueError, match="expected hidden_size > 0"):
        MarkovHeadOperation(replace(head_form(100, 4), hidden_size=0))
