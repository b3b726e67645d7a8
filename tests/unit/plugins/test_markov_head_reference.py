"""The NumPy MarkovHead against hand-made arithmetic and against the distribution it claims to draw from."""

from __future__ import annotations

import numpy as np
import pytest
from dspark_trt_plugins.markov_head.form import LARGEST_LOGIT, MarkovHeadForm
from dspark_trt_plugins.markov_head.reference import draw, finite_logits, markov_head

from tests.support.markov_head_cases import assert_draws_follow, random_inputs, random_weights

HEADS = ("vanilla", "gated", "rnn")


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_the_softmax_of_the_tempered_logits(temperature: float) -> None:
    """χ² over 200,000 draws; false-failure probability 1e-6 per case, and the seed is fixed."""
    random = np.random.default_rng(7)
    logits = random.normal(0, 1.5, 40).astype(np.float32)
    count = 200_000
    ids = draw(
        np.broadcast_to(logits, (count, 40)),
        np.full(count, temperature, np.float32),
        random.random(count, dtype=np.float32),
    )
    assert_draws_follow(ids, logits, temperature)


def test_draw_is_the_first_token_whose_cumulative_probability_exceeds_the_uniform() -> None:
    logits = np.log(np.array([[0.25, 0.5, 0.25]])).astype(np.float32).repeat(5, axis=0)
    uniforms = np.array([0.0, 0.2499, 0.2501, 0.7499, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    assert draw(logits, np.ones(5, np.float32), uniforms).tolist() == [0, 0, 1, 1, 2]


def test_draw_never_takes_a_token_without_probability() -> None:
    logits = np.full((2, 300), -LARGEST_LOGIT, np.float32)
    logits[:, 130] = 0
    assert draw(logits, np.ones(2, np.float32), np.array([0, 1 - 2.0**-24], np.float32)).tolist() == [130, 130]


def test_equal_largest_logits_give_the_lowest_id() -> None:
    logits = np.array([[1, 5, 5, 2], [3, 3, 3, 3]], np.float32)
    assert draw(logits, np.zeros(2, np.float32), np.full(2, 0.9, np.float32)).tolist() == [1, 0]


def test_extreme_temperature_does_not_overflow() -> None:
    logits = np.array([[LARGEST_LOGIT, -LARGEST_LOGIT, 0.0], [1.0, 1.5, 1.4999]], np.float32)
    with np.errstate(over="raise", invalid="raise"):
        ids = draw(logits, np.full(2, 1e-5, np.float32), np.full(2, 0.5, np.float32))
    assert ids.tolist() == [0, 1]


def test_non_finite_logits_become_finite_and_nan_is_least_preferred() -> None:
    cleaned = finite_logits(np.array([np.nan, -np.inf, np.inf, 2.5, 3e38]))
    large = np.float32(LARGEST_LOGIT)
    assert cleaned.tolist() == [-large, -large, large, 2.5, large]


@pytest.mark.parametrize("head_type", HEADS)
def test_draft_logits_are_base_logits_plus_the_bias_of_the_token_before(head_type: str) -> None:
    """The equations of the paper written out one request and one slot at a time, from the drafted ids."""
    form = MarkovHeadForm(gamma=4, vocab_size=31, markov_rank=6, head_type=head_type)  # type: ignore[arg-type]
    weights, inputs = random_weights(form, 9), random_inputs(form, 9, [0.0, 0.8])
    output = markov_head(form, weights, **inputs)
    w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    for request in range(2):
        previous = inputs["anchor_ids"][request]
        state = np.zeros(6)
        for slot in range(4):
            hidden = inputs["hidden"][request, slot]
            feature = w1[previous].astype(np.float64)
            if head_type == "gated":
                joined = np.concatenate([hidden, w1[previous]])
                gate = weights["markov_head.gate_proj.weight"] @ joined + weights["markov_head.gate_proj.bias"]
                feature = feature / (1 + np.exp(-gate))
            elif head_type == "rnn":
                joined = np.concatenate([state, w1[previous], hidden])
                joint = weights["markov_head.joint_proj.weight"] @ joined + weights["markov_head.joint_proj.bias"]
                keep = 1 / (1 + np.exp(-joint[:6]))
                state = keep * state + (1 - keep) * np.tanh(joint[6:12])
                feature = np.tanh(joint[12:])
            expected = inputs["base_logits"][request, slot] + w2 @ feature
            np.testing.assert_allclose(output.draft_logits[request, slot], expected, atol=1e-5)
            confidence = weights["confidence_head.proj.weight"][0] @ np.concatenate([hidden, w1[previous]])
            confidence += weights["confidence_head.proj.bias"][0]
            np.testing.assert_allclose(output.confidence_logits[request, slot], confidence, atol=1e-5)
            previous = output.draft_ids[request, slot]


@pytest.mark.parametrize("head_type", HEADS)
def test_confidence_sees_the_token_before_and_never_the_one_it_scores(head_type: str) -> None:
    form = MarkovHeadForm(gamma=5, vocab_size=50, markov_rank=4, head_type=head_type)  # type: ignore[arg-type]
    weights, inputs = random_weights(form, 8), random_inputs(form, 8, [1.0] * 6)
    before = markov_head(form, weights, **inputs)
    slot = 2
    changed = dict(inputs)
    changed["base_logits"] = inputs["base_logits"].copy()
    changed["base_logits"][:, slot] = -inputs["base_logits"][:, slot]
    changed["uniforms"] = inputs["uniforms"].copy()
    changed["uniforms"][:, slot:] = (inputs["uniforms"][:, slot:] + 0.5) % 1
    after = markov_head(form, weights, **changed)
    assert (before.draft_ids[:, slot] != after.draft_ids[:, slot]).all()
    np.testing.assert_array_equal(before.confidence_logits[:, : slot + 1], after.confidence_logits[:, : slot + 1])
    assert (before.confidence_logits[:, slot + 1] != after.confidence_logits[:, slot + 1]).all()


def test_rank_zero_draws_from_the_base_logits() -> None:
    form = MarkovHeadForm(gamma=3, vocab_size=20, markov_rank=0, has_confidence_head=False)
    inputs = random_inputs(form, 8, [0.0, 1.0])
    output = markov_head(form, {}, **inputs)
    np.testing.assert_array_equal(output.draft_logits, inputs["base_logits"])
    assert output.confidence_logits is None
    assert output.draft_ids[0].tolist() == inputs["base_logits"][0].argmax(axis=1).tolist()
